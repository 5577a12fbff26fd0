"""A key that config.json leaves out means what it means to transformers."""

import pytest
import transformers

from clearhead.errors import ClearheadError
from clearhead.families import FAMILIES, family_of_type
from clearhead.families.settings import Settings

KINDS = [kind for family in FAMILIES for kind in family.model_types]


@pytest.mark.parametrize("kind", KINDS)
def test_left_out_keys(kind):
    """Each key of transformers' own config in turn: its default, or, of sizes, a sentence that it is needed."""
    family = family_of_type(kind)
    full = transformers.AutoConfig.for_model(kind, pad_token_id=0).to_dict() | {"num_experts_per_tok": 2}
    config, needed = family.read_config(Settings(full, kind)), set()
    for key in full.keys() - {"model_type", "num_experts_per_tok"}:
        try:
            assert family.read_config(Settings({name: full[name] for name in full if name != key}, kind)) == config, key
        except ClearheadError:
            needed.add(key)
    assert all(isinstance(full[key], int) for key in needed - {"attention_types"})


@pytest.mark.parametrize(("key", "value"), [("norm_type", "rmsnorm"), ("attn_config", {"rope": True})])
def test_mpt_refuses_what_it_does_not_compute(key, value):
    family = family_of_type("mpt")
    words = transformers.MptConfig().to_dict()
    words[key] = words.get(key, {}) | value if isinstance(value, dict) else value
    with pytest.raises(ClearheadError, match="which this family does not compute"):
        family.read_config(Settings(words, "config.json"))
