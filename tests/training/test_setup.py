"""Test the setup of a run: rejected combinations, missing files, dropped examples and frozen weights."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import clearhead
from clearhead.api import Model, RecurrentBaseline
from clearhead.config import to_dict
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.tokenization import byte_tokenizer
from clearhead.training import setup
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from clearhead.training.setup import prepare
from tests.checkpoint.tiny import tiny_network
from tests.training.processes import run_in_processes
from tests.training.recipes import LANGUAGE_MODEL, recipe, run

PAIRS = {"data": {"kind": "synthetic_data", "task": "copy", "context": 32}}
RECURRENT = {"model": {"kind": "recurrent_model", "width": 16, "context": 32}}
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


def text_data(tmp_path, **data):
    (tmp_path / "text.txt").write_text(TEXT)
    return {"data": {"kind": "text_data", "context": 16, "path": str(tmp_path / "text.txt")} | data}


def test_data_for_another_kind_of_network_are_rejected(tmp_path):
    decoder = {"model": LANGUAGE_MODEL["model"]}
    masked = {"objective": {"kind": "masked"}}
    for layers, message in (
        ([decoder, PAIRS], "the model is a decoder, but the synthetic_data of this recipe needs an encoder-decoder"),
        ([text_data(tmp_path)], "the model is an encoder-decoder, but the text_data of this recipe needs a decoder"),
        ([text_data(tmp_path, **masked)], "needs an encoder; change the model or data.objective"),
        ([RECURRENT, PAIRS, {"data": {"form": "continuation"}}], "needs a decoder; change the model or data.form"),
    ):
        with pytest.raises(ClearheadError, match=message):
            train(recipe(*layers), tmp_path / "run", Console(file=StringIO()))
        assert not (tmp_path / "run" / "recipe.toml").exists()


def test_rows_of_span_corruption_must_fit_the_context_of_the_model(tmp_path):
    """Inputs and answer have a sentinel for each span; T5 turns 568 tokens into inputs of 512."""
    for context, model_context, share, message in (
        (8, 8, 0.15, r"data\.context is 8 \(rows of 9 tokens with span corruption\), but the model's context is 8"),
        (32, 32, 0.9, r"data\.context is 32 \(rows of 33 tokens with span corruption\), but the model"),
        (32, 30, 0.15, None),
    ):
        spans = {"objective": {"kind": "span_corruption", "share": share}, "context": context}
        layers = {"tokenizer": {"kind": "learned_tokenizer", "vocab_size": 300}, "model": {"context": model_context}}
        changed = recipe(layers, text_data(tmp_path, **spans))
        if message is None:
            batch = prepare(changed, tmp_path, False).train_data.batch(np.arange(2), np.arange(2, dtype=np.uint64))
            assert max(batch.source.shape[1], batch.tokens.shape[1]) == model_context
        else:
            with pytest.raises(ClearheadError, match=message):
                prepare(changed, tmp_path, False)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shakespeare-cpu", ["--data.path", "absent"]),
        ("shakespeare-cpu", ["--data.path", ".", "--data.validation_path", "absent"]),
        ("g2p-cpu", ["--data.train.path", "absent"]),
        ("multi30k-tiny", ["--data.train.source", ".", "--data.train.target", "absent"]),
        ("finetune-lora", ["--data.path", "absent"]),
        ("gpt2-124m", ["--data.path", ".", "--tokenizer.path", "absent"]),
    ],
)
def test_a_missing_file_gives_an_error_with_its_key_in_the_recipe(tmp_path, name, arguments):
    with pytest.raises(
        ClearheadError,
        match=f"{arguments[-2][2:]} absent does not exist; this recipe needs a file of your own: .* {arguments[-2]}",
    ):
        prepare(read_recipe(name, arguments).recipe, tmp_path, False)


def test_prepare_writes_no_files(tmp_path):
    """Every process calls it, and one of them may delete the folder while another still prepares."""
    prepare(recipe(), tmp_path / "run", False)
    assert not (tmp_path / "run").exists()


def test_a_decoder_accepts_continuations(tmp_path):
    setup = prepare(
        recipe({"model": LANGUAGE_MODEL["model"]}, PAIRS, {"data": {"form": "continuation"}}), tmp_path, False
    )
    assert setup.num_too_long == 0


def test_a_loaded_decoder_uses_the_start_token_of_its_checkpoint(tmp_path):
    """T5 and BART start with another token than the tokenizer's begin-of-text token."""
    run(tmp_path / "first", {"train": {"steps": 1}})
    model = clearhead.load(tmp_path / "first" / "model")
    other = model.tokenizer.pad_id
    assert other != model.special_ids["decoder_start_token_id"]
    model.special_ids["decoder_start_token_id"] = other
    model.save(tmp_path / "other")
    loaded = {"model": {"kind": "loaded_model", "name": str(tmp_path / "other")}, "tokenizer": None}
    rows = torch.arange(4).numpy()
    batch = prepare(recipe(loaded), Path("unused"), False).train_data.batch(rows, rows.astype("uint64"))
    assert (batch.tokens[:, 0] == other).all()


def test_muon_is_rejected_with_tensor_parallelism():
    with pytest.raises(ClearheadError, match="Muon needs complete matrices"):
        recipe({"train": {"strategy": "tp", "optimizer": {"kind": "muon"}}})


def test_lora_is_rejected_with_tensor_parallelism():
    loaded = {"model": {"kind": "loaded_model", "name": "x"}, "tokenizer": None, "lora": {"rank": 2}}
    with pytest.raises(ClearheadError, match=r"\[lora\] adapts complete matrices"):
        recipe(loaded, {"train": {"strategy": "tp"}})


def small_bert(vocab_size):
    bert = preset("bert-base")
    (layer,) = set(bert.encoder.layers)
    attention = replace(layer.attention, num_heads=2, num_kv_heads=2, head_width=8)
    layer = replace(layer, attention=attention, feed_forward=replace(layer.feed_forward, width=32))
    embedding = replace(bert.encoder.embedding, vocab_size=vocab_size)
    return replace(bert, width=16, encoder=replace(bert.encoder, embedding=embedding, layers=(layer,)))


def test_the_pooler_is_not_trained(tmp_path):
    """Masked language modeling does not use it, and DDP fails if a trained weight gets no gradient."""
    config = small_bert(60)
    bert = {
        "model": {"kind": "whole_model", "config": to_dict(config)},
        "tokenizer": {"kind": "learned_tokenizer", "algorithm": "wordpiece", "vocab_size": 60},
        "train": {"steps": 3},
    }
    layers = bert, text_data(tmp_path, objective={"kind": "masked"})
    initial = prepare(recipe(*layers), tmp_path / "fresh", False).network
    run_in_processes(2, lambda: run(tmp_path / "run", *layers) and None)
    trained = clearhead.load(tmp_path / "run" / "model").network
    unchanged = {
        name for name, weight in trained.named_parameters() if torch.equal(weight, initial.get_parameter(name))
    }
    assert unchanged >= {"pooler.weight", "pooler.bias"}
    assert not any("layers" in name for name in unchanged)


def test_the_number_of_dropped_examples_is_printed(tmp_path):
    output = StringIO()
    train(recipe({"train": {"steps": 1}, "data": {"context": 7}}), tmp_path, Console(file=output, width=120))
    assert "examples longer than data.context were dropped" in output.getvalue()


def test_a_recurrent_network_is_trained_saved_and_sampled(tmp_path):
    result = run(tmp_path, RECURRENT, {"train": {"steps": 4}})
    model = clearhead.load(result.folder / "model")
    assert isinstance(model, RecurrentBaseline)
    assert " => " in (tmp_path / "sample.txt").read_text()
    setup = prepare(recipe(RECURRENT, {"train": {"steps": 4}}), tmp_path / "fresh", False)
    initial = dict(setup.network.named_parameters())
    assert not any(torch.equal(weight, initial[name]) for name, weight in model.network.named_parameters())


def test_the_name_of_an_installed_data_set_stands_for_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    where = {"data": {"path": "books"}}
    monkeypatch.setattr(setup, "find_installed", lambda name: None)
    with pytest.raises(ClearheadError, match=r"is a data set that is not installed; run `clearhead get books`"):
        run(tmp_path / "run", LANGUAGE_MODEL, where)
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "book.txt").write_text("to be or not to be, that is the question: " * 20)
    monkeypatch.setattr(setup, "find_installed", lambda name: tmp_path / "installed")
    run(tmp_path / "run", LANGUAGE_MODEL, where, {"train": {"steps": 1}})
    assert 'path = "books"' in (tmp_path / "run" / "recipe.toml").read_text()


def test_a_loaded_model_needs_an_embedding_for_each_token_of_its_tokenizer(tmp_path):
    Model(tiny_network(vocab_size=100), byte_tokenizer()).save(tmp_path / "base")
    loaded = {"model": {"kind": "loaded_model", "name": str(tmp_path / "base")}, "tokenizer": None}
    with pytest.raises(ClearheadError, match="its tokenizer has 257 tokens, but its embedding only 100"):
        prepare(recipe(loaded, {"data": {"form": "continuation"}}), Path("unused"), False)
