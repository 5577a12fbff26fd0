"""config.json of GPT, GPT-Neo, BERT, BLOOM and MPT: what is read, what is rejected, what cannot be written."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clearhead.architecture import Dropout, NormalInitial
from clearhead.checkpoint.huggingface import load_folder
from clearhead.errors import ClearheadError
from clearhead.families import bert, bloom, family_for, family_of_type, gpt, gpt_neo, mpt, preset
from clearhead.families.settings import Settings
from tests.parity.mutants import mutants

FAMILIES = (gpt.GPT1, gpt.GPT2, gpt_neo.FAMILY, bert.FAMILY, bloom.FAMILY, mpt.FAMILY)
PRESETS = [(family, name) for family in FAMILIES for name in family.presets]


def read(family, data, **changes):
    return family.read_config(Settings({**data, **changes}, "config.json"))


@pytest.mark.parametrize(("family", "name"), PRESETS, ids=lambda part: getattr(part, "name", part))
def test_a_written_preset_reads_back(family, name):
    config = preset(name)
    assert read(family, family.write_config(config)) == config
    trained = replace(config, dropout=Dropout(residual=0.1), initial=NormalInitial(residual_scaled=True))
    assert family_for(trained) is family


@pytest.mark.parametrize(
    ("defaults", "name"),
    [
        (transformers.OpenAIGPTConfig(), "gpt1"),
        (transformers.GPT2Config(), "gpt2"),
        (transformers.GPTNeoConfig(), "gpt-neo-1.3b"),
        (transformers.BertConfig(architectures=["BertForPreTraining"]), "bert-base"),
    ],
)
def test_the_defaults_of_transformers_are_the_first_releases(defaults, name):
    found = read(family_of_type(defaults.model_type), defaults.to_dict())
    assert replace(found, classifier=None) == preset(name)  # without the head of BERT's second task


def test_the_released_config_of_bloom_is_read():
    """bigscience/bloom-560m uses older names, where transformers would write hidden_size and n_head."""
    released = {"n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880, "n_inner": None}
    assert read(bloom.FAMILY, released) == preset("bloom-560m")


def test_gpt3_has_no_hugging_face_form():
    with pytest.raises(ClearheadError, match="save it as native"):
        family_for(preset("gpt3-125m"))


# --- unsupported settings

UNSUPPORTED = [
    ("gpt1", {"afn": "gelu_new"}),
    ("gpt1", {"n_head": 7}),
    ("gpt1", {"n_head": 0}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt2", {"activation_function": "mish"}),
    ("gpt2", {"n_embd": None}),
    ("gpt-neo-125m", {"attention_types": [[["global", "local"], 5]]}),
    ("gpt-neo-125m", {"attention_types": [[["global", "banded"], 6]]}),
    ("gpt-neo-125m", {"attention_types": [[["global"], 10**15]]}),
    ("gpt-neo-125m", {"attention_types": [["global", 12]]}),
    ("gpt-neo-125m", {"attention_types": None}),
    ("bert-base", {"position_embedding_type": "relative_key"}),
    ("bert-base", {"is_decoder": True}),
    ("bert-base", {"add_cross_attention": True}),
    ("bert-base", {"tie_word_embeddings": False}),
    ("bloom-560m", {"apply_residual_connection_post_layernorm": True}),
    ("bloom-560m", {"slow_but_exact": True}),
    ("bloom-560m", {"n_inner": 1024}),
    ("mpt-7b", {"no_bias": False}),
    ("mpt-7b", {"expansion_ratio": 8}),
    ("mpt-7b", {"logit_scale": "inv_sqrt_d_model"}),
    ("mpt-7b", {"attn_config": {"alibi": False}}),
    ("mpt-7b", {"attn_config": {"qk_ln": True}}),
    ("mpt-7b", {"attn_config": {"prefix_lm": True}}),
    ("mpt-7b", {"attn_config": {"attn_uses_sequence_id": True}}),
    ("mpt-7b", {"attn_config": {"attn_type": "multiquery_attention"}}),
]


@pytest.mark.parametrize(("name", "setting"), UNSUPPORTED)
def test_unsupported_settings_are_rejected(name, setting):
    family = family_for(preset(name))
    data = family.write_config(preset(name))
    read(family, data)
    ((key, value),) = setting.items()
    setting_name = next(iter(value)) if isinstance(value, dict) else key
    messages = {"n_head": "cannot be divided among", "activation_function": "unknown activation"}
    with pytest.raises(ClearheadError, match=messages.get(setting_name, setting_name)):
        read(family, data, **setting)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_written_config_reads_back(family):
    """A config one field away from a preset is written completely, or rejected."""
    config = preset(next(iter(family.presets)))
    num_rejected = 0
    for _, other in mutants(config):
        try:
            data = family.write_config(other)
        except ClearheadError:
            num_rejected += 1
        else:
            assert read(family, data) == other
    assert num_rejected >= 20


# --- checkpoints as on the Hub


PATTERN = [[["global", "local"], 1]]
NEO = transformers.GPTNeoConfig(hidden_size=8, num_layers=2, attention_types=PATTERN, num_heads=2, vocab_size=11)


@pytest.mark.parametrize(
    ("config", "extra_tensors"),
    [
        (
            transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11),
            ("h.0.attn.bias", "h.1.attn.masked_bias"),
        ),
        (
            transformers.OpenAIGPTConfig(n_embd=8, n_layer=2, n_head=2, vocab_size=11),
            ("h.0.attn.bias", "position_ids"),
        ),
        (NEO, ("h.0.attn.attention.bias", "h.1.attn.attention.masked_bias")),
    ],
    ids=("gpt2", "gpt1", "gpt-neo"),
)
def test_checkpoints_without_prefix_and_with_masks_are_read(config, extra_tensors, tmp_path):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = load_folder(tmp_path).network.state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    headless = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(headless | {name: torch.ones(1) for name in extra_tensors}, tmp_path / "model.safetensors")
    found = load_folder(tmp_path).network.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    save_file(headless | {"h.0.attn.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ClearheadError, match=r"h\.0\.attn\.extra"):
        load_folder(tmp_path)
