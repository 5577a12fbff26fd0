"""T5 and T5 v1.1 compared with transformers, with a tied, an untied and a scaled head."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from clearhead.families import preset, t5
from clearhead.families.settings import Settings
from tests.parity.harness import (
    VOCAB,
    Case,
    build_reference,
    check_float64,
    check_logits,
    check_mutants,
    check_round_trip,
)

SMALL = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "d_kv": 20,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 1e-3,
    "attn_implementation": "eager",
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def t5_model(**changes):
    return lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**(SMALL | changes)))


def untied(**changes):
    def build():
        model = t5_model(**changes)()
        model.lm_head = nn.Linear(SMALL["d_model"], VOCAB, bias=False)  # as in a loaded model with an untied head
        return model

    return build


def draw_attention(name, tensor):
    """Draw small queries, since scores are not scaled, and relative biases as large as the scores."""
    if name.endswith("Attention.q.weight"):
        return torch.randn_like(tensor) * (SMALL["d_model"] * SMALL["d_kv"]) ** -0.5
    if "relative_attention_bias" in name:
        return torch.randn_like(tensor)
    return None


CASES = [
    Case("t5", t5_model(), draw=draw_attention, length=40),
    Case("t5-gelu", t5_model(feed_forward_proj="gelu"), draw=draw_attention, length=40),
    Case("t5-v1.1", untied(**GATED), draw=draw_attention, length=40),
    Case("t5-v1.1-tied", t5_model(**GATED), draw=draw_attention, length=40),
    Case("t5-gated-silu", untied(**GATED | {"feed_forward_proj": "gated-silu"}), draw=draw_attention, length=40),
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
    assert check_mutants(case, tmp_path) >= 60


@pytest.mark.parametrize("name", t5.PRESETS)
def test_a_written_preset_reads_back(name):
    assert t5.read_config(Settings(t5.write_config(preset(name)), "written")) == preset(name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_every_combination_of_head_settings_reads_back(tied, scaled):
    data = t5.write_config(preset("t5-small")) | {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled}
    config = t5.read_config(Settings(data, "changed"))
    assert (config.head.tied, config.head.scale == 1.0) == (tied, not scaled)
    assert t5.read_config(Settings(t5.write_config(config), "written")) == config


def test_the_released_config_of_v1_1_is_untied():
    """The first releases contain `tie_word_embeddings: false`, but not `scale_decoder_outputs`."""
    data = {
        key: value for key, value in t5.write_config(preset("t5-v1.1-small")).items() if key != "scale_decoder_outputs"
    }
    assert t5.read_config(Settings(data, "config.json")) == preset("t5-v1.1-small")


def test_a_checkpoint_of_v1_0_with_all_duplicates_loads(tmp_path):
    """Early files contain the token table four times, and an unused table for cross-attention."""
    model = build_reference(CASES[0])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in t5.DUPLICATES:
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(16, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    network = load_folder(tmp_path).network
    assert network.config.head.tied
    assert sum(parameter.numel() for parameter in network.parameters()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"feed_forward_proj": "gated-swiglu", "dense_act_fn": None, "is_gated_act": None},
        {"is_gated_act": True},
        {"is_encoder_decoder": False},
        {"is_decoder": True},
    ],
    ids=json.dumps,
)
def test_unsupported_settings_are_rejected(wrong):
    data = t5.write_config(preset("t5-small")) | wrong
    with pytest.raises(ClearheadError, match=r"config\.json"):
        t5.read_config(Settings(data, "config.json"))


@pytest.mark.parametrize(
    "wrong",
    [{"d_model": 0}, {"num_decoder_layers": 0}, {"num_layers": 10**8}, {"d_kv": -1}, {"num_heads": None}],
    ids=json.dumps,
)
def test_impossible_sizes_are_rejected(wrong):
    with pytest.raises(ClearheadError, match=next(iter(wrong))):
        t5.read_config(Settings(t5.write_config(preset("t5-small")) | wrong, "config.json"))


@pytest.mark.parametrize("name", ["transformer-base", "bart-base", "llama-7b"])
def test_configs_of_other_families_cannot_be_written(name):
    with pytest.raises(ClearheadError, match="this family needs"):
        t5.write_config(preset(name))
