"""/v1/chat/completions: roles, deltas, log-probabilities, templates."""

import pytest

from clearhead.server.schemas import chat_fields
from clearhead.server.settings import Limits
from tests.server.toys import CHAT, LETTERS, serve, toy_model

PATH = "/v1/chat/completions"


def stream(server, **fields):
    return server.events(PATH, {"messages": CHAT, "logit_bias": LETTERS, "max_tokens": 8, **fields})


def test_the_answer_continues_the_rendered_template(server):
    answer = server.chat(temperature=0)
    message = answer["choices"][0]["message"]
    assert answer["object"] == "chat.completion"
    assert message["role"] == "assistant"
    assert message["content"] == server.text("[user]Hello\n[assistant]", temperature=0)
    assert answer["usage"]["prompt_tokens"] == len("[user]Hello\n[assistant]")


def test_a_stream_begins_with_the_role_and_ends_with_an_empty_delta(server):
    events = stream(server, seed=3)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(list(delta) == ["content"] and delta["content"] for delta in deltas[1:-1])
    assert (
        "".join(delta["content"] for delta in deltas[1:-1]) == server.chat(seed=3)["choices"][0]["message"]["content"]
    )
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in events}) == 1


def test_several_texts_in_a_stream_have_one_role_each(server):
    events = stream(server, n=3, seed=1)
    roles = [event["choices"][0]["index"] for event in events if "role" in event["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]
    texts = [""] * 3
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in server.chat(n=3, seed=1)["choices"]]


def test_logprobs_have_tokens_bytes_and_alternatives(server):
    choice = server.chat(temperature=0, logprobs=True, top_logprobs=2)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries)
    events = stream(server, temperature=0, logprobs=True, top_logprobs=2)
    streamed = [entry for event in events for entry in (event["choices"][0]["logprobs"] or {}).get("content", [])]
    assert streamed == entries
    assert server.chat(temperature=0)["choices"][0]["logprobs"] is None


def test_a_stop_token_is_not_among_the_logprobs_of_a_chat(server):
    force = {str(server.service.model.tokenizer.eos_id): 100}
    choice = server.chat(logit_bias=force, logprobs=True)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == ""
    assert choice["logprobs"]["content"] == []


def test_parts_of_a_content_are_joined_and_developers_are_system(server):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    one = server.chat([{"role": "developer", "content": "S"}, {"role": "user", "content": parts}], temperature=0)
    two = server.chat([{"role": "system", "content": "S"}, {"role": "user", "content": "Hello"}], temperature=0)
    assert one["choices"][0]["message"] == two["choices"][0]["message"]


def test_variables_reach_the_template_but_cannot_replace_its_own(server):
    prompt = server.chat(chat_template_kwargs={"enable_thinking": True})["usage"]["prompt_tokens"]
    assert prompt == server.chat()["usage"]["prompt_tokens"] + len("<think>")
    for name in ("messages", "add_generation_prompt", "tools"):
        answer = server.post(PATH, {"messages": CHAT, "chat_template_kwargs": {name: []}})
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]


def test_without_max_tokens_the_context_is_used_up(server):
    long = [{"role": "user", "content": "x" * 200}]
    usage = server.chat(long, max_tokens=None)["usage"]
    assert usage["total_tokens"] == server.service.max_length
    assert server.chat(max_completion_tokens=3, max_tokens=None)["usage"]["completion_tokens"] == 3


def test_fields_with_nothing_to_change_are_accepted(server):
    allowed = {"tool_choice": "none", "tools": [], "parallel_tool_calls": False, "modalities": ["text"], "store": False}
    body = {**dict.fromkeys(chat_fields(Limits())), **allowed, "messages": CHAT, "max_tokens": 1}
    assert server.post(PATH, body).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("store", True),
        ("prediction", {"type": "content", "content": "x"}),
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
        ("web_search_options", {}),
    ],
)
def test_a_known_field_that_is_not_supported_is_refused_by_name(server, field, value):
    answer = server.post(PATH, {"messages": CHAT, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"].startswith(f"{field} is not supported")


def test_a_model_without_a_template_answers_completions_only():
    model = toy_model()
    model.tokenizer.chat_template = None
    with serve(model) as server:
        answer = server.post(PATH, {"messages": CHAT})
        assert answer.status_code == 400
        assert "use /v1/completions" in answer.json()["error"]["message"]
        assert server.text(max_tokens=2)


def test_a_template_that_refuses_messages_is_a_bad_request():
    model = toy_model()
    model.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with serve(model) as server:
        answer = server.post(PATH, {"messages": CHAT})
        assert answer.status_code == 400
        assert "roles must alternate" in answer.json()["error"]["message"]
