"""LLaMA with every rotary scaling, SmolLM2, SmolLM3 and Mistral compared with transformers."""

import pytest
import transformers

from tests.parity.decoder_cases import YARN_TRUNCATED
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


def llama(**changes):
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SMALL | changes)))


def rope(rope_type, **parameters):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN_EXACT = rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False, beta_fast=8.0)
CASES = [
    Case("llama", llama()),
    Case("llama-mha-wide-heads", llama(num_key_value_heads=4, head_dim=16)),
    Case("llama-bias", llama(attention_bias=True, mlp_bias=True)),
    Case("llama3-scaling", llama(**LLAMA3), length=60),
    Case("llama-linear", llama(**rope("linear", factor=4.0)), length=60),
    # transformers rotates all texts of a batch for the length of the longest
    Case(
        "llama-dynamic",
        llama(**rope("dynamic", factor=4.0), max_position_embeddings=16),
        length=60,
        rows_alone=True,
    ),
    Case("llama-yarn", llama(rope_parameters=YARN_TRUNCATED, head_dim=32), length=90),
    Case("llama-yarn-untruncated", llama(**YARN_EXACT, head_dim=32), length=90),
    Case("smollm2-tied", llama(tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=2)),
    Case(
        "smollm3",
        lambda: transformers.SmolLM3ForCausalLM(
            transformers.SmolLM3Config(**(SMALL | {"num_hidden_layers": 5, "pad_token_id": 0}))
        ),
    ),
    Case(
        "mistral",
        lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**(SMALL | {"sliding_window": 5}))),
    ),
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
