"""Settings that are absent from config.json have the defaults of transformers."""

import pytest
import transformers

from clearhead.errors import ClearheadError
from clearhead.families import FAMILIES, family_of_type
from clearhead.families.settings import Settings

# With transformers' defaults, half of a head has an odd width.
IMPOSSIBLE_DEFAULTS = {"glm4_moe": {"head_dim": 128}}
# By default BigBird-Pegasus attends to random blocks, which is refused.
IMPOSSIBLE_DEFAULTS["bigbird_pegasus"] = {"attention_type": "original_full"}
MODEL_TYPES = [model_type for family in FAMILIES for model_type in family.model_types]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_absent_settings_have_the_defaults_of_transformers(model_type):
    """Remove each setting of transformers' config in turn: its default is the same, or it is a required size."""
    check_absent_settings(family_of_type(model_type), model_type)


def check_absent_settings(family, model_type):
    full = transformers.AutoConfig.for_model(model_type, pad_token_id=0).to_dict() | {"num_experts_per_tok": 2}
    full |= IMPOSSIBLE_DEFAULTS.get(model_type, {})
    config, required = family.read_config(Settings(full, model_type)), set()
    for key in full.keys() - {"model_type", "num_experts_per_tok", "pad_token_id"}:
        remaining = {name: full[name] for name in full if name != key}
        try:
            assert family.read_config(Settings(remaining, model_type)) == config, key
        except ClearheadError:
            required.add(key)
    assert all(isinstance(full[key], int) for key in required - {"attention_types", "attention_type"})


@pytest.mark.parametrize(("key", "value"), [("norm_type", "rmsnorm"), ("attn_config", {"rope": True})])
def test_mpt_rejects_unsupported_settings(key, value):
    family = family_of_type("mpt")
    data = transformers.MptConfig().to_dict()
    data[key] = data.get(key, {}) | value if isinstance(value, dict) else value
    with pytest.raises(ClearheadError, match="which is not supported"):
        family.read_config(Settings(data, "config.json"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("use_parallel_residual", [1], r"placement is unknown|\[1\]"),
        ("rotary_pct", float("nan"), r"'rotary_pct' is nan; it must be finite"),
        ("rotary_pct", 1e308, r"the rotary share of a head is 1e\+308; it must be from 0 to 1"),
    ],
)
def test_values_that_no_network_can_have_are_refused(name, value, message):
    full = transformers.AutoConfig.for_model("gpt_neox").to_dict() | {"rope_parameters": None, name: value}
    with pytest.raises(ClearheadError, match=message):
        family_of_type("gpt_neox").read_config(Settings(full, "config.json"))


@pytest.mark.parametrize("value", [7, 0.5, True, {"p2c": 1}, "c2p"])
def test_deberta_needs_both_kinds_of_relative_scores(value):
    full = transformers.AutoConfig.for_model("deberta-v2").to_dict()
    settings = full | {"relative_attention": True, "pos_att_type": value}
    with pytest.raises(ClearheadError, match="'pos_att_type' must be both c2p and p2c"):
        family_of_type("deberta-v2").read_config(Settings(settings, "config.json"))
