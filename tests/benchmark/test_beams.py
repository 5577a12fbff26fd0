"""Test the beam search benchmark on a small Marian model: equal tokens in transformers and CTranslate2."""

import pytest

from clearhead.families.bart import StackSize, bart_config

pytest.importorskip("ctranslate2")

from benchmarks import beams

SIZE = StackSize(num_layers=2, num_heads=4, feed_forward=96)


@pytest.fixture(scope="module")
def model():
    config = bart_config(
        "marian",
        width=64,
        encoder=SIZE,
        decoder=SIZE,
        vocab_size=301,
        context=64,
        activation="silu",
        scaled=True,
    )
    return beams.random_model(config)


def test_some_texts_end_early_and_some_do_not(model):
    lengths = [len(text) for text in beams.clearhead_translator(model)(beams.random_sources(model.config, 32))]
    assert 8 < lengths.count(beams.NUM_TOKENS) < 24
    assert min(lengths) < beams.NUM_TOKENS


def test_tokens_equal_those_of_transformers_on_200_inputs(model, tmp_path):
    assert beams.count_equal_texts(model, 200, tmp_path / "marian") == 200


def test_all_engines_generate_the_same_number_of_tokens(model, tmp_path, monkeypatch):
    monkeypatch.setattr(beams, "PAUSE_SECONDS", 0)
    results = beams.measure_speeds(model, tmp_path / "without_end", rounds=1)
    assert [(result["engine"], result["batch"]) for result in results] == [
        (name, batch) for batch in (1, 8) for name in ("clearhead", "ctranslate2", "huggingface")
    ]
    endless = beams.without_end(model)
    sources = beams.random_sources(model.config, 8, length=24)
    texts = beams.clearhead_translator(endless)(sources)
    assert texts == beams.transformers_translator(endless, tmp_path / "without_end")(sources)
    ctranslate2_texts = beams.ctranslate2_translator(tmp_path / "without_end", tmp_path / "again")(sources)
    assert (
        sum(a == b for a, b in zip(texts, ctranslate2_texts, strict=True)) >= 7
    )  # without end tokens the stopping rules are the same
