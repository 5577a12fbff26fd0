"""Beam search of a Marian-shaped model on random inputs: the tokens of transformers, and three engines that agree."""

import pytest

from clearhead.families.bart import Size, bart

pytest.importorskip("ctranslate2")

from benchmarks import beams

SIZE = Size(num_layers=2, num_heads=4, feed_forward=96)


@pytest.fixture(scope="module")
def model():
    config = bart(
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
    lengths = [len(text) for text in beams.ours(model)(beams.random_sources(model.config, 32))]
    assert 8 < lengths.count(beams.NUM_TOKENS) < 24
    assert min(lengths) < beams.NUM_TOKENS


def test_200_inputs_give_the_tokens_of_transformers(model, tmp_path):
    assert beams.num_agreeing(model, 200, tmp_path / "marian") == 200


def test_all_engines_do_the_same_work(model, tmp_path, monkeypatch):
    monkeypatch.setattr(beams, "PAUSE_SECONDS", 0)
    rows = beams.speeds(model, tmp_path / "endless", rounds=1)
    assert [(row["engine"], row["batch"]) for row in rows] == [
        (name, batch) for batch in (1, 8) for name in ("clearhead", "ctranslate2", "huggingface")
    ]
    one = beams.endless(model)
    sources = beams.random_sources(model.config, 8, length=24)
    texts = beams.ours(one)(sources)
    assert texts == beams.by_transformers(one, tmp_path / "endless")(sources)
    theirs = beams.by_ctranslate2(tmp_path / "endless", tmp_path / "again")(sources)
    assert sum(a == b for a, b in zip(texts, theirs, strict=True)) >= 7  # without ends the rules are the same
