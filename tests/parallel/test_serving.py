"""`clearhead serve` in two processes: the answers of one process, a clean end, and one sentence when a process dies."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from clearhead.api import Model, load
from clearhead.tokenization import SpecialTokens
from clearhead.tokenization.characters import byte_tokenizer, character_tokenizer
from tests.checkpoint.tiny import tiny_network
from tests.model.toys import toy, translator
from tests.parallel.served_processes import served, started
from tests.server.toys import serve

BODIES = [
    {"prompt": "Hello", "temperature": 0, "max_tokens": 40},
    {"prompt": "Hello, this prompt has more than one page of tokens", "temperature": 0, "max_tokens": 40},
    {
        "prompt": "Hello, this prompt has more than one page of signs",
        "temperature": 1,
        "seed": 7,
        "n": 3,
        "max_tokens": 30,
    },
    {"prompt": [[1, 2, 3], [4, 5]], "temperature": 0.5, "seed": 1, "max_tokens": 20},
    {"prompt": "Scored", "echo": True, "max_tokens": 0, "temperature": 0},
]
LOST = (
    "error: a process of the server has ended or does not answer any more, so all of them end; start the server again"
)


def ask(url, body):
    answer = httpx2.post(f"{url}/v1/completions", json={**body, "logprobs": 3}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def assert_same_answers(url, others, bodies, tolerance):
    """Compare tokens and texts exactly, and log-probabilities up to rounding; all requests run at the same time."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        found, expected = (list(pool.map(lambda body, url=url: ask(url, body), bodies)) for url in (url, others))
    for ours, theirs in zip(found, expected, strict=True):
        for choice, other in zip(ours, theirs, strict=True):
            scores, other_scores = choice.pop("logprobs"), other.pop("logprobs")
            assert choice == other
            assert scores["tokens"] == other_scores["tokens"]
            values = [value for value in scores["token_logprobs"] if value is not None]
            others = [value for value in other_scores["token_logprobs"] if value is not None]
            assert values == pytest.approx(others, abs=tolerance)


def streamed_text(url, body):
    with httpx2.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return "".join(httpx2.Response(200, text=line).json()["choices"][0]["text"] for line in lines[:-1])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoder") / "toy"
    tokenizer = byte_tokenizer()
    Model(tiny_network(vocab_size=tokenizer.vocab_size, context=8192), tokenizer).save(folder)
    return folder


def test_two_processes_answer_like_one_and_end_together(decoder, tmp_path):
    with served(decoder, tmp_path) as group, serve(load(decoder, fast=False)) as single:
        assert_same_answers(group.url, single.url, BODIES * 2, 1e-5)
        assert streamed_text(group.url, BODIES[0]) == ask(group.url, BODIES[0])[0]["text"]
        embedded = httpx2.post(f"{group.url}/v1/embeddings", json={"input": "Hello"})
        assert embedded.status_code == 400
        assert "serve it in one process" in embedded.json()["error"]["message"]
        ids = httpx2.post(f"{group.url}/inspect/encode", json={"text": "Hello"}).json()["tokens"]
        traced = httpx2.post(f"{group.url}/inspect/trace", json={"tokens": [each["id"] for each in ids]})
        assert traced.status_code == 400
        assert "cannot be inspected" in traced.json()["error"]["message"]
        long = {"prompt": "Hello", "max_tokens": 300, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{group.url}/v1/completions", json=long, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for process in group.processes:  # as torchrun does
                process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert group.wait() == [0, 0]
        assert group.messages(1) == []


def test_an_encoder_decoder_in_float64_and_the_death_of_a_process(tmp_path):
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz", SpecialTokens(unknown="?", eos="."))
    ids = {"decoder_start_token_id": 0, "eos_token_id": tokenizer.eos_id}
    Model(toy(translator(context=8192)), tokenizer, special_ids=ids).save(tmp_path / "toy")
    bodies = [{"prompt": text, "temperature": 0, "max_tokens": 20} for text in ("hello", "world", "a", "longertext")]
    options = ("--dtype", "float64", "--deterministic")
    single = serve(load(tmp_path / "toy", dtype="float64", fast=False), deterministic=True)
    with served(tmp_path / "toy", tmp_path, *options) as group, single as one:
        assert_same_answers(group.url, one.url, bodies, 1e-12)
        long = {"prompt": "hello", "max_tokens": 8000, "temperature": 0, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{group.url}/v1/completions", json=long, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            group.processes[1].kill()
            assert '"error"' in [line for line in lines if line][-1]
        assert group.wait() == [1, -signal.SIGKILL]
        assert [line for line in group.messages(0) if not line.startswith("note")] == [LOST]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_an_idle_process_ends_all(decoder, tmp_path, killed):
    with served(decoder, tmp_path, size=2) as group:
        group.processes[killed].kill()
        group.wait()
        assert group.processes[1 - killed].returncode == 1
        assert [line for line in group.messages(1 - killed) if not line.startswith("note")] == [LOST]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (3, (), "2 key-value heads cannot be divided among 3 processes; start a number of processes that divides them"),
        (2, ("--weights", "int8"), "runs in PyTorch's modules with full weights"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_sentence(decoder, tmp_path, size, options, message):
    with started(decoder, tmp_path, *options, size=size) as group:
        assert group.wait() == [1] * size
        printed = [line for rank in range(size) for line in group.messages(rank)]
        assert len(printed) == 1
        assert message in printed[0]
