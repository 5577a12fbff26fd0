"""MPT against transformers, whose class computes `alibi_bias_max` 8 whatever the config says."""

import functools

import pytest
import transformers
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.parity.harness import VOCAB, Case, check_float64, check_logits, check_mutants, check_round_trip

SMALL = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 4,
    "max_seq_len": 32,
    "layer_norm_epsilon": 1e-3,
    "attn_implementation": "eager",
}


def mpt(attention=None, **changes):
    return lambda: transformers.MptForCausalLM(transformers.MptConfig(**(SMALL | {"attn_config": attention} | changes)))


def storywriter():
    """The released setting, put where transformers' class would look for it."""
    model = mpt({"alibi_bias_max": 16, "clip_qkv": 1.0})()
    model.transformer.build_mpt_alibi_tensor = functools.partial(build_mpt_alibi_tensor, alibi_bias_max=16)
    return model


CASES = [
    # 12 heads: the slopes of a number that is no power of two
    Case("mpt-12-heads", mpt(n_heads=12), positions_as_argument=False),
    Case("mpt-clipped", mpt({"clip_qkv": 1.0, "softmax_scale": 0.4}), positions_as_argument=False),
    Case("mpt-untied", mpt(tie_word_embeddings=False), positions_as_argument=False),
]
STORYWRITER = Case("storywriter", storywriter, positions_as_argument=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal(case, tmp_path):
    check_logits(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_identical_in_float64(case, tmp_path):
    check_float64(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip_through_the_disk(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_one_field_error_is_seen(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


def test_storywriter_slopes(tmp_path):
    check_logits(STORYWRITER, tmp_path)
