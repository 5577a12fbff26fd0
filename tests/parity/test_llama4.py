"""Llama 4's language part against transformers, alone and inside the model that sees images."""

import pytest
import torch
import transformers

from clearhead.checkpoint.huggingface import load_folder
from tests.parity.harness import (
    VOCAB,
    Case,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
    inputs,
    rerandomize,
)

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "max_position_embeddings": 128,
    "attention_chunk_size": 7,
    "floor_scale": 5,
    "attn_scale": 0.3,
    "rms_norm_eps": 1e-3,
}
SCOUT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 20,
}


def llama4(**changes):
    return lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**(SMALL | {"attn_implementation": "eager"} | changes))
    )


def large_router(name, parameter):
    """Logits up to 60: in float32 their sigmoids are 1 from 17 on."""
    return 3 * torch.randn_like(parameter) if "router" in name else None


CASES = [
    # low = high makes a step: just below the second frequency's wave, one token more moves nothing
    Case("scout", llama4(rope_parameters=SCOUT_ROPE), length=60, blind=("original_context + 1",)),
    Case("maverick", llama4(use_qk_norm=False, interleave_moe_layer_step=2)),
    Case("top-two-bias", llama4(num_experts_per_tok=2, attention_bias=True, attn_temperature_tuning=False)),
    Case("saturated-router", llama4(num_local_experts=8), special=large_router),
    Case(
        "listed-layers",
        llama4(
            num_hidden_layers=4,
            no_rope_layers=[1, 0, 0, 1],
            layer_types=["chunked_attention", "chunked_attention", "full_attention", "full_attention"],
            moe_layers=[0, 3],
        ),
    ),
]


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
    assert check_mutants(case, tmp_path) >= 20


def test_language_part_of_a_model_that_sees(tmp_path):
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    config = transformers.Llama4Config(text_config=SMALL, vision_config=vision, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    rerandomize(model, lambda name, parameter: None)
    model.save_pretrained(tmp_path)
    network = load_folder(tmp_path).network
    given = inputs(CASES[0], network.config, padded=False)
    with torch.no_grad():
        theirs = model(input_ids=given["tokens"], attention_mask=given["attention_mask"], use_cache=False).logits
        assert (network(**given) - theirs).abs().max() <= 1e-5
