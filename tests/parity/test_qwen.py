"""Qwen 2, Qwen 3 and Qwen 3 with experts compared with transformers."""

import pytest
import transformers

from tests.parity.harness import VOCAB, Case, check_float64, check_logits, check_mutants, check_round_trip

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "attn_implementation": "eager",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
# The model cards recommend YaRN beyond 32,768 tokens; ramp and context are adapted to small heads.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
    "beta_fast": 8.0,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5}


def qwen2(**changes):
    return lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(SMALL | changes)))


def qwen3(**changes):
    return lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SMALL | {"head_dim": 16} | changes)))


def qwen3_moe(**changes):
    return lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(SMALL | EXPERTS | changes)))


CASES = [
    Case("qwen2", qwen2()),
    Case("qwen2-windows", qwen2(**WINDOWS, max_window_layers=2, tie_word_embeddings=True)),
    Case("qwen3", qwen3()),
    Case("qwen3-tied-bias", qwen3(tie_word_embeddings=True, attention_bias=True)),
    Case("qwen3-windows", qwen3(**WINDOWS, max_window_layers=1)),
    Case(
        "qwen3-listed-windows",
        qwen3(**WINDOWS, layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    Case("qwen3-yarn", qwen3(head_dim=32, rope_parameters=YARN), length=90),
    Case("qwen3-moe", qwen3_moe(norm_topk_prob=True)),
    Case("qwen3-moe-not-renormalized", qwen3_moe(norm_topk_prob=False)),
    Case("qwen3-moe-some-dense", qwen3_moe(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1])),
    Case("qwen3-moe-windows", qwen3_moe(**WINDOWS, norm_topk_prob=True)),
]


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
