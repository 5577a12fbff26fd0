"""Llama 4's language part compared with transformers, alone and inside the multimodal model."""

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
    make_inputs,
    randomize,
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
    """Draw router weights whose logits reach 60; in float32 the sigmoid is 1 from 17 on."""
    return 3 * torch.randn_like(parameter) if "router" in name else None


CASES = [
    # Equal low and high factors make the scaling a step; here one more token of context does not cross it.
    Case("scout", llama4(rope_parameters=SCOUT_ROPE), length=60, undetectable=("original_context + 1",)),
    Case("maverick", llama4(use_qk_norm=False, interleave_moe_layer_step=2)),
    Case("top-two-bias", llama4(num_experts_per_tok=2, attention_bias=True, attn_temperature_tuning=False)),
    Case("saturated-router", llama4(num_local_experts=8), draw=large_router),
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
    assert check_mutants(case, tmp_path) >= 20


def test_language_part_of_the_multimodal_model(tmp_path):
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
    randomize(model)
    model.save_pretrained(tmp_path)
    network = load_folder(tmp_path).network
    inputs = make_inputs(CASES[0], network.config, padded=False)
    with torch.no_grad():
        theirs = model(input_ids=inputs["tokens"], attention_mask=inputs["attention_mask"], use_cache=False).logits
        assert (network(**inputs) - theirs).abs().max() <= 1e-5
