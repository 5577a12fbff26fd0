"""A key that config.json leaves out means what it means to transformers."""

import pytest
import transformers

from clearhead.errors import ClearheadError
from clearhead.families import family_of_type
from clearhead.families.settings import Settings

CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "smollm3": transformers.SmolLM3Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
}
KEYS = ("num_key_value_heads", "sliding_window", "rms_norm_eps", "tie_word_embeddings", "attention_bias")


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("key", KEYS)
def test_left_out_keys(kind, key):
    family = family_of_type(kind)
    full = CLASSES[kind](pad_token_id=0).to_dict()
    without = {name: value for name, value in full.items() if name != key}
    assert family.read(Settings(without, kind)) == family.read(Settings(full, kind))


@pytest.mark.parametrize(("key", "value"), [("norm_type", "rmsnorm"), ("attn_config", {"rope": True})])
def test_mpt_refuses_what_it_does_not_compute(key, value):
    family = family_of_type("mpt")
    words = transformers.MptConfig().to_dict()
    words[key] = words.get(key, {}) | value if isinstance(value, dict) else value
    with pytest.raises(ClearheadError, match="which this family does not compute"):
        family.read(Settings(words, "config.json"))
