"""What a recipe may not mix is refused before anything is trained; what is left out is said."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import clearhead
from clearhead.api import RecurrentBaseline
from clearhead.config import to_dict
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from clearhead.training.setup import prepare
from tests.training.crew import start_crew
from tests.training.recipes import LANGUAGE, recipe, run

PAIRS = {"data": {"kind": "synthetic_data", "task": "copy", "context": 32}}
RECURRENT = {"model": {"kind": "recurrent_model", "width": 16, "context": 32}}
TEXT = "the cat sat on the mat and the dog sat on the log. " * 40


def language(tmp_path, **data):
    (tmp_path / "text.txt").write_text(TEXT)
    return {"data": {"kind": "text_data", "context": 16, "path": str(tmp_path / "text.txt")} | data}


def test_data_for_another_kind_of_model_are_refused(tmp_path):
    decoder = {"model": LANGUAGE["model"]}
    masked = {"objective": {"kind": "masked"}}
    for layers, complaint in (
        ([decoder, PAIRS], "the model is a decoder, and the synthetic_data of this recipe is for an encoder-decoder"),
        ([language(tmp_path)], "the model is an encoder-decoder, and the text_data of this recipe is for a decoder"),
        ([language(tmp_path, **masked)], "is for an encoder; change the model, or data.objective"),
        ([RECURRENT, PAIRS, {"data": {"form": "continuation"}}], "is for a decoder; change the model, or data.form"),
    ):
        with pytest.raises(ClearheadError, match=complaint):
            train(recipe(*layers), tmp_path / "run", Console(file=StringIO()))
        assert not (tmp_path / "run" / "recipe.toml").exists()


def test_rows_of_span_corruption_fit_the_model(tmp_path):
    """Both sides have a sentinel for each span; T5 fills 512 tokens with what is left of 568."""
    for context, model_context, share, complaint in (
        (8, 8, 0.15, "data.context is 8, of which span corruption makes rows of 9, the model is made for 8"),
        (32, 32, 0.9, "data.context is 32, of which span corruption makes rows of 33, the model"),
        (32, 30, 0.15, None),
    ):
        spans = {"objective": {"kind": "span_corruption", "share": share}, "context": context}
        layers = {"tokenizer": {"kind": "learned_tokenizer", "vocab_size": 300}, "model": {"context": model_context}}
        asked = recipe(layers, language(tmp_path, **spans))
        if complaint is None:
            batch = prepare(asked, tmp_path, False).train.batch(np.arange(2), np.arange(2, dtype=np.uint64))
            assert max(batch.source.shape[1], batch.tokens.shape[1]) == model_context
        else:
            with pytest.raises(ClearheadError, match=complaint):
                prepare(asked, tmp_path, False)


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
def test_a_file_that_is_missing_is_told_by_its_name_in_the_recipe(tmp_path, name, arguments):
    with pytest.raises(ClearheadError, match=f"{arguments[-2][2:]} absent does not exist; give {arguments[-2]}, or"):
        prepare(read_recipe(name, arguments).recipe, tmp_path, False)


def test_preparing_writes_nothing(tmp_path):
    """Every process prepares; a folder that one of them clears away must not be written to by another."""
    prepare(recipe(), tmp_path / "run", False)
    assert not (tmp_path / "run").exists()


def test_continuations_are_for_a_decoder(tmp_path):
    setup = prepare(recipe({"model": LANGUAGE["model"]}, PAIRS, {"data": {"form": "continuation"}}), tmp_path, False)
    assert setup.num_left_out == 0


def test_a_loaded_decoder_starts_as_its_checkpoint_says(tmp_path):
    """T5 and BART start from another token than the tokenizer's begin of text."""
    run(tmp_path / "first", {"train": {"steps": 1}})
    model = clearhead.load(tmp_path / "first" / "model")
    other = model.tokenizer.pad_id
    assert other != model.special_ids["decoder_start_token_id"]
    model.special_ids["decoder_start_token_id"] = other
    model.save(tmp_path / "other")
    loaded = {"model": {"kind": "loaded_model", "name": str(tmp_path / "other")}, "tokenizer": None}
    rows = torch.arange(4).numpy()
    batch = prepare(recipe(loaded), Path("unused"), False).train.batch(rows, rows.astype("uint64"))
    assert (batch.tokens[:, 0] == other).all()


def test_muon_is_refused_under_tensor_parallel():
    with pytest.raises(ClearheadError, match="Muon looks at whole matrices"):
        recipe({"train": {"strategy": "tp", "optimizer": {"kind": "muon"}}})


def test_low_rank_additions_are_refused_under_tensor_parallel():
    loaded = {"model": {"kind": "loaded_model", "name": "x"}, "tokenizer": None, "lora": {"rank": 2}}
    with pytest.raises(ClearheadError, match=r"\[lora\] adds to whole matrices"):
        recipe(loaded, {"train": {"strategy": "tp"}})


def small_bert(vocab_size):
    bert = preset("bert-base")
    (layer,) = set(bert.encoder.layers)
    attention = replace(layer.attention, num_heads=2, num_kv_heads=2, head_width=8)
    layer = replace(layer, attention=attention, feed_forward=replace(layer.feed_forward, width=32))
    embedding = replace(bert.encoder.embedding, vocab_size=vocab_size)
    return replace(bert, width=16, encoder=replace(bert.encoder, embedding=embedding, layers=(layer,)))


def test_the_pooler_is_left_as_it_was(tmp_path):
    """No masked token asks it, and DDP stops at a weight that is trained and gets no gradient."""
    config = small_bert(60)
    bert = {
        "model": {"kind": "whole_model", "config": to_dict(config)},
        "tokenizer": {"kind": "learned_tokenizer", "algorithm": "wordpiece", "vocab_size": 60},
        "train": {"steps": 3},
    }
    layers = bert, language(tmp_path, objective={"kind": "masked"})
    fresh = prepare(recipe(*layers), tmp_path / "fresh", False).network
    start_crew(2, lambda: run(tmp_path / "run", *layers) and None)
    trained = clearhead.load(tmp_path / "run" / "model").network
    same = {name for name, weight in trained.named_parameters() if torch.equal(weight, fresh.get_parameter(name))}
    assert same >= {"pooler.weight", "pooler.bias"}
    assert not any("layers" in name for name in same)


def test_examples_left_out_are_counted_aloud(tmp_path):
    said = StringIO()
    train(recipe({"train": {"steps": 1}, "data": {"context": 7}}), tmp_path, Console(file=said, width=120))
    assert "examples are longer than data.context and left out" in said.getvalue()


def test_a_recurrent_translator_is_saved_and_says_what_it_learnt(tmp_path):
    done = run(tmp_path, RECURRENT, {"train": {"steps": 4}})
    model = clearhead.load(done.folder / "model")
    assert isinstance(model, RecurrentBaseline)
    assert " => " in (tmp_path / "sample.txt").read_text()
    setup = prepare(recipe(RECURRENT, {"train": {"steps": 4}}), tmp_path / "fresh", False)
    fresh = dict(setup.network.named_parameters())
    assert not any(torch.equal(weight, fresh[name]) for name, weight in model.network.named_parameters())
