"""Who takes part, who cannot and is told so in a sentence, and what all of them are given."""

import importlib
from dataclasses import replace

import pytest
import torch

from clearhead.api import load
from clearhead.benchmark.line_up import line_up
from clearhead.benchmark.ours import open_ours
from clearhead.benchmark.subject import Subject, draw
from clearhead.errors import ClearheadError
from tests.benchmark.conftest import CAPACITY
from tests.checkpoint.tiny import tiny_config
from tests.verification.models import toy_model


def test_a_line_up_in_the_weights_asked_for(subject):
    notes = []
    engines = line_up(subject, ["bfloat16", "float32"], ["huggingface"], notes.append)
    assert [str(engine) for engine in engines] == [
        "clearhead bfloat16",
        "clearhead float32",
        "huggingface bfloat16",
        "huggingface float32",
    ]
    assert notes == []


@pytest.mark.parametrize(
    ("peer", "package", "weights"),
    [
        ("llama.cpp", "llama-cpp-python", "int8, int4"),
        ("ctranslate2", "ctranslate2", "int8"),
        ("huggingface", "transformers", "bfloat16"),
    ],
)
def test_a_peer_that_is_not_installed(peer, package, weights, subject, monkeypatch):
    def none(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", none)
    notes = []
    engines = line_up(subject, weights.split(", "), [peer], notes.append)
    assert {engine.name for engine in engines} == {"clearhead"}
    assert notes == [f"{peer} {weights} is left out: it is not installed; pip install {package}"]


@pytest.mark.parametrize(
    ("style", "peer", "weights", "words"),
    [
        ("llama", "llama.cpp", "int8", "llama.cpp int8 is left out: it needs a .gguf file, and this model is none"),
        ("llama", "huggingface", "int4", "of the weights asked for it runs none, but float32 and bfloat16"),
        ("gopher", "huggingface", "float32", "no family of Hugging Face models computes this"),
        ("deepseek", "ctranslate2", "float32", "its converter does not know this model: No conversion is registered"),
    ],
)
def test_a_peer_that_does_not_know_the_model(style, peer, weights, words, tmp_path):
    pytest.importorskip({"llama.cpp": "llama_cpp"}.get(peer, "transformers"))
    pytest.importorskip("ctranslate2" if peer == "ctranslate2" else "transformers")
    notes = []
    engines = line_up(Subject(toy_model(style), None, CAPACITY, tmp_path), [weights], [peer], notes.append)
    assert [engine.name for engine in engines] == ["clearhead"]
    assert words in notes[-1]


def test_stored_blocks_need_a_file_of_them(subject):
    notes = []
    (_,) = line_up(subject, ["float32", "stored"], [], notes.append)
    assert notes == ["clearhead stored is left out: it needs a .gguf file, and this model is none"]


def test_one_format_that_fails_does_not_take_others_along(subject, monkeypatch):
    def only_half(subject, weights):
        if weights == "int8":
            raise ClearheadError("eight bits are too many")
        return open_ours(subject, weights)

    monkeypatch.setattr("clearhead.benchmark.line_up.open_ours", only_half)
    notes = []
    engines = line_up(subject, ["float32", "int8", "int4"], [], notes.append)
    assert [engine.weights for engine in engines] == ["float32", "int4"]
    assert notes == ["clearhead int8 is left out: eight bits are too many"]


@pytest.mark.parametrize("style", ["bert", "t5"])
def test_encoders_are_refused(style, tmp_path):
    with pytest.raises(ClearheadError, match="this model has an encoder"):
        line_up(Subject(toy_model(style), None, CAPACITY, tmp_path), ["float32"], [], print)


def test_a_text_beyond_learned_positions_is_refused(tmp_path):
    subject = Subject(toy_model("gpt2"), None, 193, tmp_path)
    with pytest.raises(ClearheadError, match="prompt and tokens together are 193; this model ends at 192"):
        subject.check()
    replace(subject, capacity=192).check()


# --- what they are given


def test_prompts_are_as_long_as_asked(stories15m, tmp_path):
    subject = Subject(load(stories15m, dtype="float32", fast=False), stories15m, CAPACITY, tmp_path)
    long = subject.prompt(300)
    assert len(long) == 300
    assert long[:7] == subject.prompt(7)
    assert long.count(1) == 1  # the start of a text comes once
    assert "keeper of the lighthouse" in subject.model.tokenizer.decode(long)


def test_a_drawn_model_is_the_same_each_time():
    one, other = (draw(tiny_config(), torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert next(one.network.parameters()).dtype == torch.bfloat16
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(one.network(tokens), other.network(tokens))
    assert one.network(tokens).isfinite().all()
