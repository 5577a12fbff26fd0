"""MPT compared with transformers, whose class uses an `alibi_bias_max` of 8 whatever the config contains."""

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
    """Return a model in which the released `alibi_bias_max` takes effect."""
    model = mpt({"alibi_bias_max": 16, "clip_qkv": 1.0})()
    model.transformer.build_mpt_alibi_tensor = functools.partial(build_mpt_alibi_tensor, alibi_bias_max=16)
    return model


CASES = [
    # 12 heads: ALiBi has other slopes if the number of heads is not a power of two
    Case("mpt-12-heads", mpt(n_heads=12), takes_position_ids=False),
    Case("mpt-clipped", mpt({"clip_qkv": 1.0, "softmax_scale": 0.4}), takes_position_ids=False),
    Case("mpt-untied", mpt(tie_word_embeddings=False), takes_position_ids=False),
]
STORYWRITER = Case("storywriter", storywriter, takes_position_ids=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree(case, tmp_path):
    check_logits(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_agree_in_float64(case, tmp_path):
    check_float64(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_checkpoint_round_trip(case, tmp_path):
    check_round_trip(case, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_error_in_one_field_is_detected(case, tmp_path):
    assert check_mutants(case, tmp_path) >= 12


def test_logits_agree_with_the_slopes_of_storywriter(tmp_path):
    check_logits(STORYWRITER, tmp_path)
