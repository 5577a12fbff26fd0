"""BLOOM compared with transformers."""

import pytest
import transformers

from tests.parity.harness import VOCAB, Case, check_float64, check_logits, check_mutants, check_round_trip

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "n_layer": 3,
    "n_head": 4,
    "layer_norm_epsilon": 1e-3,
    "attn_implementation": "eager",
}


def case(name, **changes):
    def build():
        return transformers.BloomForCausalLM(transformers.BloomConfig(**(SMALL | changes)))

    # transformers writes √(2/π) with eight digits, which is visible in float64
    return Case(name, build, takes_position_ids=False, tolerance_float64=1e-8)


# 12 heads: ALiBi has other slopes if the number of heads is not a power of two
CASES = [case("bloom"), case("bloom-12-heads", n_head=12), case("bloom-untied", tie_word_embeddings=False)]


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
