"""T5 and T5 v1.1 against transformers, with the head tied, untied and scaled."""

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
from tests.parity.harness import VOCAB, Case, build, check_float64, check_logits, check_mutants, check_round_trip

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
    def make():
        model = t5_model(**changes)()
        model.lm_head = nn.Linear(SMALL["d_model"], VOCAB, bias=False)  # as if loaded with a head of its own
        return model

    return make


def draws(name, tensor):
    """Scores are not scaled, so queries are; the bias of a distance weighs as much as a score."""
    if name.endswith("Attention.q.weight"):
        return torch.randn_like(tensor) * (SMALL["d_model"] * SMALL["d_kv"]) ** -0.5
    if "relative_attention_bias" in name:
        return torch.randn_like(tensor)
    return None


CASES = [
    Case("t5", t5_model(), special=draws, length=40),
    Case("t5-gelu", t5_model(feed_forward_proj="gelu"), special=draws, length=40),
    Case("t5-v1.1", untied(**GATED), special=draws, length=40),
    Case("t5-v1.1-tied", t5_model(**GATED), special=draws, length=40),
    Case("t5-gated-silu", untied(**GATED | {"feed_forward_proj": "gated-silu"}), special=draws, length=40),
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
    assert check_mutants(case, tmp_path) >= 60


@pytest.mark.parametrize("name", t5.PRESETS)
def test_presets_survive_their_own_words(name):
    assert t5.read_config(Settings(t5.write_config(preset(name)), "written")) == preset(name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_head_survives_its_own_words(tied, scaled):
    words = t5.write_config(preset("t5-small")) | {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled}
    config = t5.read_config(Settings(words, "changed"))
    assert (config.head.tied, config.head.scale == 1.0) == (tied, not scaled)
    assert t5.read_config(Settings(t5.write_config(config), "written")) == config


def test_release_of_v1_1_is_untied():
    """The first releases say only `tie_word_embeddings: false`."""
    words = {
        key: value for key, value in t5.write_config(preset("t5-v1.1-small")).items() if key != "scale_decoder_outputs"
    }
    assert t5.read_config(Settings(words, "config.json")) == preset("t5-v1.1-small")


def test_release_of_v1_0_with_every_copy(tmp_path):
    """Early files hold the table four times and an unused one for cross-attention."""
    model = build(CASES[0])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in t5.DUPLICATES:
        tensors[name] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.zeros(16, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    network = load_folder(tmp_path).network
    assert network.config.head.tied
    assert sum(one.numel() for one in network.parameters()) == sum(one.numel() for one in model.parameters())


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
def test_unknown_words_are_refused(wrong):
    words = t5.write_config(preset("t5-small")) | wrong
    with pytest.raises(ClearheadError, match=r"config\.json"):
        t5.read_config(Settings(words, "config.json"))


@pytest.mark.parametrize(
    "wrong",
    [{"d_model": 0}, {"num_decoder_layers": 0}, {"num_layers": 10**8}, {"d_kv": -1}, {"num_heads": None}],
    ids=json.dumps,
)
def test_impossible_sizes_are_refused(wrong):
    with pytest.raises(ClearheadError, match=next(iter(wrong))):
        t5.read_config(Settings(t5.write_config(preset("t5-small")) | wrong, "config.json"))


@pytest.mark.parametrize("name", ["transformer-base", "bart-base", "llama-7b"])
def test_other_families_cannot_be_said(name):
    with pytest.raises(ClearheadError, match="this family has"):
        t5.write_config(preset(name))
