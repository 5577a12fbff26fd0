"""/v1/completions: the contract that evaluators and clients rely on (A1 to A12), over a real socket."""

import math

import pytest

from clearhead.server.schemas import completion_fields
from clearhead.server.settings import Limits
from tests.server.toys import LETTERS

PATH = "/v1/completions"


def stream(server, **fields):
    return server.events(PATH, {"prompt": "Hello", "logit_bias": LETTERS, "max_tokens": 8, **fields})


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 5}, {"seed": -(2**63), "top_p": 0.9, "top_k": 9}])
def test_a_stream_has_the_text_of_a_complete_answer(server, fields):
    events = stream(server, **fields)
    assert "".join(event["choices"][0]["text"] for event in events) == server.text(**fields)
    assert {(event["id"], event["created"], event["model"], event["object"]) for event in events} == {
        (events[0]["id"], events[0]["created"], "toy", "text_completion")
    }
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {None}
    assert all(event["system_fingerprint"].startswith("fp_") for event in events)


def test_the_text_is_that_of_the_python_api(server):
    body = {"temperature": 0.8, "seed": 3, "max_tokens": 12}
    bias = {int(token): value for token, value in LETTERS.items()}
    ours = server.service.model.generate("Hello", temperature=0.8, seed=3, max_new_tokens=12, logit_bias=bias)
    assert server.text(**body) == ours.text


def test_usage_counts_tokens(server):
    answer = server.complete("Hello", max_tokens=5)
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_usage_of_a_stream_comes_last(server):
    events = stream(server, stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    continuous = stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in continuous]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all("usage" not in event for event in stream(server))


def test_cached_tokens_of_a_prefix_are_reported(server):
    prompt = "A prefix of more than one page of tokens, which is read once. " * 2
    first, second = (server.complete(prompt, max_tokens=1)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] < 32
    assert second["prompt_tokens_details"]["cached_tokens"] >= 96


def test_n_texts_of_several_prompts_are_in_order(server):
    answer = server.complete(["Hello", "World"], n=3, seed=7, temperature=1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts[:3])) == 3
    assert texts == [text["text"] for text in server.complete(["Hello", "World"], n=3, seed=7)["choices"]]
    assert texts[3:] == [text["text"] for text in server.complete("World", n=3, seed=7)["choices"]]
    events = stream(server, prompt=["Hello", "World"], n=3, seed=7)
    streamed = [""] * 6
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == texts
    finished = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"]]
    assert sorted(finished) == list(range(6))


@pytest.mark.parametrize("prompt", [[72, 101], [[72, 101]], ["He"], "He"])
def test_the_four_forms_of_a_prompt(server, prompt):
    assert server.text(prompt, temperature=0) == server.text("He", temperature=0)


def test_a_seed_gives_the_same_text_while_others_run(server):
    from concurrent.futures import ThreadPoolExecutor

    alone = server.text("Alone", seed=11, max_tokens=30)
    with ThreadPoolExecutor(8) as threads:
        others = [threads.submit(server.text, f"other {number}", max_tokens=40) for number in range(7)]
        assert [server.text("Alone", seed=11, max_tokens=30) for _ in range(3)] == [alone] * 3
        assert len({other.result() for other in others}) == 7
    assert server.text("Alone", seed=12, max_tokens=30) != alone


# --- log-probabilities


def test_logprobs_have_the_tokens_of_the_text(server):
    choice = server.complete(temperature=0, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(value <= 0 for value in logprobs["token_logprobs"])
    assert logprobs["text_offset"] == list(range(8))
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value
        assert 3 <= len(top) <= 4
    none = server.complete(temperature=0, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]
    assert none["token_logprobs"] == logprobs["token_logprobs"]
    events = stream(server, temperature=0, logprobs=3)
    parts = [event["choices"][0]["logprobs"] for event in events]
    for name in logprobs:
        assert [value for part in parts for value in part[name]] == logprobs[name]


def test_echo_scores_the_prompt_as_the_python_api_does(server):
    text = "Hello world"
    scored = server.service.model.score(text).logprobs
    choice = server.complete(text, echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(text)
    assert len(choice["text"]) == len(text) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1 : len(text)] == pytest.approx(scored, abs=1e-6)
    assert logprobs["text_offset"] == list(range(len(text) + 1))
    for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert max(top.values()) >= value


def test_echo_without_new_tokens_returns_only_the_prompt(server):
    answer = server.complete([list(b"One"), list(b"Three")], echo=True, logprobs=1, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == ["One", "Three"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 5]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 0
    assert server.complete("Hi", echo=True, max_tokens=0)["choices"][0]["text"] == "Hi"


def test_echo_and_several_texts_in_a_stream(server):
    events = stream(server, prompt=["Hello", "World"], n=2, seed=1, echo=True, logprobs=0, max_tokens=3)
    texts, counts = [""] * 4, [0] * 4
    for event in events:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        counts[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert [text[:5] for text in texts] == ["Hello", "Hello", "World", "World"]
    assert counts == [8] * 4


# --- the end of a text


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(server):
    whole = server.text(temperature=0, max_tokens=20)
    stop = whole[6:9]
    expected = whole[: whole.index(stop)]
    for given in (stop, [stop], ["no such text", stop]):
        choice = server.complete(temperature=0, max_tokens=20, stop=given)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    events = stream(server, temperature=0, max_tokens=20, stop=stop, logprobs=0)
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    tokens = [token for event in events for token in event["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == expected


def test_a_stop_string_that_does_not_complete_is_part_of_the_text(server):
    whole = server.text(temperature=0, max_tokens=8)
    choice = server.complete(temperature=0, max_tokens=8, stop=whole[-2:] + "X")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole, "length")
    events = stream(server, temperature=0, max_tokens=8, stop=whole[-2:] + "X")
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_stop_tokens_end_the_text_unless_they_are_ignored(server):
    model = server.service.model
    force = {str(model.tokenizer.eos_id): 100}
    choice = server.complete(logit_bias=force, logprobs=0, max_tokens=5)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert choice["logprobs"]["tokens"] == ["<|endoftext|>"]  # lm-evaluation-harness counts on one score per token
    ignored = server.complete(logit_bias=force, ignore_eos=True, max_tokens=5)
    assert ignored["usage"]["completion_tokens"] == 5
    assert server.complete(logit_bias=force | LETTERS, min_tokens=3, max_tokens=6)["usage"]["completion_tokens"] == 4
    stopped = server.complete(temperature=0, stop_token_ids=[ord(server.text(temperature=0)[0])])
    assert stopped["choices"][0]["finish_reason"] == "stop"


def test_a_bias_bans_and_forces_tokens(server):
    assert server.text(logit_bias={"88": 100}, max_tokens=3) == "XXX"
    first = server.text(temperature=0, max_tokens=1)
    banned = server.text(temperature=0, max_tokens=1, logit_bias=LETTERS | {str(ord(first)): -100})
    assert banned != first


def test_fields_with_nothing_to_change_are_accepted(server):
    body = {
        **dict.fromkeys(completion_fields(Limits())),
        "prompt": "Hi",
        "user": "me",
        "best_of": 2,
        "n": 2,
        "suffix": "",
        "store": False,
        "service_tier": "auto",
    }
    assert server.post(PATH, body).status_code == 200


def test_a_split_character_is_never_sent_in_parts(server):
    """The bytes of é are two tokens; with a bias, the text alternates between both."""
    model = server.service.model
    first, second = "é".encode()
    choice = server.complete(logit_bias={str(first): 100}, max_tokens=1, logprobs=0)["choices"][0]
    assert choice["logprobs"]["tokens"] == [r"bytes:\xc3"]
    assert choice["text"] == "�"  # an incomplete character at the very end
    assert math.isfinite(choice["logprobs"]["token_logprobs"][0])
    assert model.tokenizer.decode([first, second]) == "é"
