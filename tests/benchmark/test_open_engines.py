"""Test which engines are opened, the notes on those that are skipped, and what all of them are given."""

import importlib
from dataclasses import replace

import pytest
import torch

from clearhead.api import load
from clearhead.benchmark import BenchmarkTarget, create_random_model, open_engines
from clearhead.benchmark.clearhead_engine import open_clearhead
from clearhead.errors import ClearheadError
from tests.benchmark.conftest import CAPACITY
from tests.checkpoint.tiny import tiny_config
from tests.verification.models import toy_model


def test_engines_are_opened_in_the_requested_weights(target):
    notes = []
    engines = open_engines(target, ["bfloat16", "float32"], ["huggingface"], notes.append)
    assert [str(engine) for engine in engines] == [
        "clearhead bfloat16",
        "clearhead float32",
        "huggingface bfloat16",
        "huggingface float32",
    ]
    assert notes == []


@pytest.mark.parametrize(
    ("name", "package", "weights"),
    [
        ("llama.cpp", "llama-cpp-python", "int8, int4"),
        ("ctranslate2", "ctranslate2", "int8"),
        ("huggingface", "transformers", "bfloat16"),
    ],
)
def test_an_engine_that_is_not_installed_is_skipped(name, package, weights, target, monkeypatch):
    def raise_import_error(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", raise_import_error)
    notes = []
    engines = open_engines(target, weights.split(", "), [name], notes.append)
    assert {engine.name for engine in engines} == {"clearhead"}
    assert notes == [f"skipped {name} {weights}: it is not installed; run: pip install {package}"]


@pytest.mark.parametrize(
    ("style", "name", "weights", "message"),
    [
        (
            "llama",
            "llama.cpp",
            "int8",
            "skipped llama.cpp int8: it needs a .gguf file, but this model has another format",
        ),
        ("llama", "huggingface", "int4", "it supports none of the requested weights, only float32 and bfloat16"),
        ("gopher", "huggingface", "float32", "no Hugging Face model type can express this configuration"),
        (
            "deepseek",
            "ctranslate2",
            "float32",
            "its converter does not support this model: No conversion is registered",
        ),
    ],
)
def test_an_engine_that_does_not_support_the_model_is_skipped(style, name, weights, message, tmp_path):
    pytest.importorskip({"llama.cpp": "llama_cpp"}.get(name, "transformers"))
    pytest.importorskip("ctranslate2" if name == "ctranslate2" else "transformers")
    notes = []
    engines = open_engines(BenchmarkTarget(toy_model(style), None, CAPACITY, tmp_path), [weights], [name], notes.append)
    assert [engine.name for engine in engines] == ["clearhead"]
    assert message in notes[-1]


def test_stored_weights_need_a_gguf_file(target):
    notes = []
    (_,) = open_engines(target, ["float32", "stored"], [], notes.append)
    assert notes == ["skipped clearhead stored: it needs a .gguf file, but this model has another format"]


def test_a_format_that_fails_does_not_affect_the_others(target, monkeypatch):
    def fail_for_int8(target, weights):
        if weights == "int8":
            raise ClearheadError("this is a test")
        return open_clearhead(target, weights)

    monkeypatch.setattr("clearhead.benchmark.engines.open_clearhead", fail_for_int8)
    notes = []
    engines = open_engines(target, ["float32", "int8", "int4"], [], notes.append)
    assert [engine.weights for engine in engines] == ["float32", "int4"]
    assert notes == ["skipped clearhead int8: this is a test"]


@pytest.mark.parametrize("style", ["bert", "t5"])
def test_models_with_an_encoder_raise(style, tmp_path):
    with pytest.raises(ClearheadError, match="this model has an encoder"):
        open_engines(BenchmarkTarget(toy_model(style), None, CAPACITY, tmp_path), ["float32"], [], print)


def test_a_capacity_beyond_the_learned_positions_raises(tmp_path):
    target = BenchmarkTarget(toy_model("gpt2"), None, 193, tmp_path)
    with pytest.raises(ClearheadError, match="new tokens have 193 tokens together; this model reads at most 192"):
        target.check()
    replace(target, capacity=192).check()


# --- prompts and random models


def test_prompts_have_the_requested_length(stories15m, tmp_path):
    target = BenchmarkTarget(load(stories15m, dtype="float32", fast=False), stories15m, CAPACITY, tmp_path)
    long = target.prompt(300)
    assert len(long) == 300
    assert long[:7] == target.prompt(7)
    assert long.count(1) == 1  # the beginning-of-text token comes once
    assert "keeper of the lighthouse" in target.model.tokenizer.decode(long)


def test_random_models_are_reproducible():
    one, other = (create_random_model(tiny_config(), torch.bfloat16, torch.device("cpu")) for _ in range(2))
    assert next(one.network.parameters()).dtype == torch.bfloat16
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(one.network(tokens), other.network(tokens))
    assert one.network(tokens).isfinite().all()
