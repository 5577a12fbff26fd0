"""Gemma 3's language part compared with transformers, alone and inside the multimodal model."""

import pytest
import torch
import transformers

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from clearhead.families import family_of_type, preset
from clearhead.families.settings import Settings
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
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-3,
}
ROPE_BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
}


def gemma(**changes):
    return lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**(SMALL | {"attn_implementation": "eager"} | changes))
    )


def draw_norms(name, parameter):
    """Draw norm weights around 0, since Gemma stores them minus 1."""
    return 0.3 * torch.randn_like(parameter) if "norm" in name else None


CASES = [
    Case("gemma3", gemma(), draw=draw_norms),
    Case("gemma3-ropes", gemma(rope_parameters=ROPE_BY_TYPE, final_logit_softcapping=2.0), length=60, draw=draw_norms),
    # `attn_logit_softcapping` is in the config, but transformers does not use it
    Case(
        "gemma3-untied-bias",
        gemma(attention_bias=True, attn_logit_softcapping=5.0, tie_word_embeddings=False),
        draw=draw_norms,
    ),
    Case(
        "gemma3-listed-layers",
        gemma(num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"]),
        draw=draw_norms,
    ),
    Case("gemma3-all-windowed", gemma(num_hidden_layers=3), draw=draw_norms),
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


def read(**data):
    """Return the config that these settings describe."""
    return family_of_type("gemma3_text").read_config(Settings({"model_type": "gemma3_text", **data}, "config.json"))


def test_older_rotary_settings_are_equivalent():
    older = {
        "rope_theta": 50000.0,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 6,
    }
    assert read(**SMALL, **older) == read(**SMALL, rope_parameters=ROPE_BY_TYPE)


def test_absent_settings_mean_the_released_sizes():
    """Read the complete text_config of google/gemma-3-4b-pt."""
    released = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    assert read(**released) == preset("gemma-3-4b")


def test_bidirectional_attention_is_rejected():
    with pytest.raises(ClearheadError, match="use_bidirectional_attention"):
        read(**SMALL, use_bidirectional_attention=True)


def test_language_part_of_the_multimodal_model(tmp_path):
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=SMALL, vision_config=vision, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(model, draw_norms)
    model.save_pretrained(tmp_path)
    network = load_folder(tmp_path).network
    inputs = make_inputs(CASES[0], network.config, padded=False)
    with torch.no_grad():
        theirs = model(input_ids=inputs["tokens"], attention_mask=inputs["attention_mask"], use_cache=False).logits
        assert (network(**inputs) - theirs).abs().max() <= 1e-5
