"""The settings in which two configs differ."""

from dataclasses import replace

from clearhead.config import config_changes
from clearhead.families import preset


def test_equal_configs_have_no_changes():
    assert config_changes(preset("gpt2"), preset("gpt2")) == []


def test_changed_added_and_removed_settings_are_listed():
    old = preset("llama-7b")
    layer = old.decoder.layers[0]
    attention = replace(layer.attention, num_kv_heads=8, softcap=30.0)
    changed = replace(old, decoder=replace(old.decoder, layers=(replace(layer, attention=attention),) * 32))
    assert config_changes(old, changed) == [
        "decoder.layers.0.attention.num_kv_heads: 32 → 8",
        "decoder.layers.0.attention.softcap: none → 30.0",
    ]
    assert "decoder.layers.0.attention.softcap: 30.0 → none" in config_changes(changed, old)
