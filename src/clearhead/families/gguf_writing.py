"""Describe a config by the metadata of a GGUF file, the inverse of `gguf_settings`.

    metadata = gguf_metadata(config, "llama", family, {"token_embd.weight": (49152, 576)})

`shapes` are those of the tensors that the file will hold. The metadata is read back: an architecture that would give
another config is not used.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from clearhead.architecture import (
    Dropout,
    GroupedAttention,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    NormalInitial,
    Rope,
)
from clearhead.config import to_dict
from clearhead.errors import ClearheadError
from clearhead.families.family import Family
from clearhead.families.gguf import gguf_settings
from clearhead.families.gguf_architectures import ARCHITECTURES
from clearhead.families.gguf_row import LONG_FACTORS, ROTARY_DIVISORS, GgufArchitecture
from clearhead.families.heads import write_config

_FLOAT32_ERROR = 1e-6  # relative; the metadata holds 32-bit numbers
_TENSORS_OF: dict[type, str] = {Llama3Scaling: ROTARY_DIVISORS, LongRopeScaling: LONG_FACTORS}


def gguf_metadata(
    config: ModelConfig, name: str, family: Family, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the metadata of a config as the GGUF architecture `name`, which belongs to `family`.

    Raise ClearheadError if the architecture cannot express the config.
    """
    architecture = ARCHITECTURES[name]
    stored_name = architecture.stored_name or name
    data = write_config(family, config)
    rope = _rope_settings(data)
    settings = data | rope | {architecture.keys.get("rope.freq_base", ""): rope["rope_theta"]} | _window_settings(data)
    metadata: dict[str, Any] = {"general.architecture": stored_name}
    for key, setting in architecture.keys.items():
        if settings.get(setting) is not None:
            metadata[f"{stored_name}.{key}"] = settings[setting]
    more_keys = {**architecture.constants, **_head_keys(config, data), **architecture.write(data, config)}
    for key, value in more_keys.items():
        metadata[key if key.startswith("tokenizer.") else f"{stored_name}.{key}"] = value
    metadata |= {f"{stored_name}.rope.scaling.{key}": value for key, value in _scaling_keys(data).items()}
    assert family.read_config is not None
    read_back = family.read_config(gguf_settings(metadata, shapes, f"a GGUF file of type {name}"))
    if not _equal(to_dict(_as_metadata_describes(config, architecture)), to_dict(read_back)):
        raise ClearheadError(f"a GGUF file of type {name} cannot express this configuration")
    return metadata


def _head_keys(config: ModelConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths of values and of the rotated part of a head."""
    attention = config.output_stack.layers[0].attention
    if not isinstance(attention, GroupedAttention) or not isinstance(attention.position, Rope):
        return {}
    widths = {"rope.dimension_count": attention.position.width or attention.head_width}
    return widths if data.get("head_dim") is None else {**widths, "attention.value_length": attention.head_width}


def _rope_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary base, and for Gemma that of the layers with a window."""
    rope = data.get("rope_parameters") or {}
    if "full_attention" not in rope and "sliding_attention" not in rope:
        return {"rope_theta": rope.get("rope_theta")}
    full, windowed = rope.get("full_attention", {}), rope.get("sliding_attention", {})
    return {"rope_theta": full.get("rope_theta"), "rope_local_base_freq": windowed.get("rope_theta")}


def _scaling_keys(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a rotary scaling. Llama 3's is stored as a tensor, and others cannot be expressed."""
    rope = data.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "longrope":
        keys = {"type": "longrope", "attn_factor": rope["attention_factor"]}
        return keys | {"original_context_length": rope["original_max_position_embeddings"]}
    if rope.get("rope_type") not in ("linear", "yarn"):
        return {}
    keys = {"type": rope["rope_type"], "factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys |= {"yarn_beta_fast": rope["beta_fast"], "yarn_beta_slow": rope["beta_slow"]}
    original = rope.get("original_max_position_embeddings")
    return keys | ({} if original is None else {"original_context_length": original})


def _window_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return after how many layers with a window one attends to all tokens, if there are both kinds."""
    types = data.get("layer_types") or []
    is_full = [kind == "full_attention" for kind in types]
    if not types:
        return {}
    if not any(is_full) or all(is_full):
        return {} if data.get("sliding_window") is None or not all(is_full) else {"sliding_window": None}
    return {"sliding_window_pattern": is_full.index(True) + 1}


def _as_metadata_describes(config: ModelConfig, architecture: GgufArchitecture) -> ModelConfig:
    """Return the config without a rotary scaling that is stored as tensors, and without what only training needs."""
    config = replace(config, dropout=Dropout(), initial=NormalInitial())
    if config.decoder is None:
        return config
    layers = []
    for layer in config.decoder.layers:
        attention = layer.attention
        rope = attention.position if isinstance(attention, GroupedAttention) else None
        if isinstance(rope, Rope) and _TENSORS_OF.get(type(rope.scaling)) in architecture.rotary_tensors:
            assert isinstance(attention, GroupedAttention)
            layer = replace(layer, attention=replace(attention, position=replace(rope, scaling=None)))
        layers.append(layer)
    decoder = replace(config.decoder, layers=tuple(layers))
    return replace(config, decoder=decoder)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal, numbers up to the precision of float32."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return (
            isinstance(one, float | int)
            and isinstance(other, float | int)
            and isclose(one, other, rel_tol=_FLOAT32_ERROR)
        )
    return bool(one == other)
