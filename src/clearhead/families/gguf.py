"""GGUF files: translate their metadata to transformers' settings and their tensor names to ours.

    settings = gguf_settings(metadata, shapes, "a.gguf"); names = gguf_architecture(metadata, shapes).tensor_names

gguf_architectures.py has the table of architectures, and gguf_row.py says what its rows mean.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError, quote
from clearhead.families.gguf_architectures import ARCHITECTURES
from clearhead.families.gguf_row import LONG_FACTORS, GgufArchitecture
from clearhead.families.settings import Settings

# Keys that change the result -> the values that change nothing, for architectures that do not have the key
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "logit_scale": (1.0,),
    "attention.scale": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "use_parallel_residual": (False,),
    "final_logit_softcapping": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "expert_count": (0,),
    "embedding_scale": (1.0,),
    "residual_scale": (1.0,),
    "attention.sliding_window": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.dimension_sections": ([0, 0, 0, 0],),
}


def gguf_architecture(metadata: Mapping[str, Any], tensors: Collection[str]) -> GgufArchitecture:
    """Return the architecture that a file's metadata and the names of its tensors describe."""
    stored_name = str(metadata.get("general.architecture"))
    has_experts = bool(to_plain_value(metadata.get(f"{stored_name}.expert_count")))
    found = [
        architecture
        for name, architecture in ARCHITECTURES.items()
        if stored_name == (architecture.stored_name or name)
    ]
    if not found:
        known = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if each.stored_name is None))
        raise ClearheadError(
            f"GGUF files of the architecture {quote(stored_name)} are not supported; supported are {known}"
        )
    fitting = [each for each in found if _conditions_hold(each, metadata, f"{stored_name}.", tensors)] or found
    return next((each for each in fitting if ("expert_count" in each.keys) == has_experts), fitting[0])


def _conditions_hold(
    architecture: GgufArchitecture, metadata: Mapping[str, Any], prefix: str, tensors: Collection[str]
) -> bool:
    """Return whether a file has the values and the tensor that tell rows with one stored name apart."""
    if architecture.only_with is not None and architecture.only_with not in tensors:
        return False
    return all(to_plain_value(metadata.get(prefix + key)) in values for key, values in architecture.only_if.items())


def gguf_settings(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> Settings:
    """Return the settings that transformers' config.json of the same model would hold.

    `shapes` are the shapes of the stored tensors by their names.
    """
    architecture, prefix = gguf_architecture(metadata, shapes), f"{metadata['general.architecture']}."
    # without the vocabulary, which may be long
    stored = Settings({key: to_plain_value(value) for key, value in metadata.items() if key.startswith(prefix)}, where)
    _check_supported(stored, prefix, architecture, shapes)
    data: dict[str, Any] = dict(architecture.defaults)
    data |= {setting: stored.data[prefix + key] for key, setting in architecture.keys.items() if prefix + key in stored}
    if "rope.dimension_count" not in architecture.keys:
        rotary_width = stored.data.get(prefix + "rope.dimension_count")
        data |= _rotary_settings(architecture, rotary_width, _head_width_of(data), where)
    vocab_size, *_ = shapes.get("token_embd.weight", (None,))
    data |= {"model_type": architecture.model_type, "vocab_size": vocab_size}
    if "token_types.weight" in architecture.tensor_names:
        data["type_vocab_size"] = shapes.get("token_types.weight", (0,))[0]
    data["tie_word_embeddings"] = "output.weight" not in shapes
    data |= {setting: tensor in shapes for setting, tensor in architecture.flags.items()}
    data |= architecture.fixed
    data["rope_scaling"] = rope_scaling(stored, prefix + "rope.")
    if data["rope_scaling"].get("rope_type") == "yarn":
        data["rope_scaling"] |= architecture.yarn
    data |= architecture.read(data, {key.removeprefix(prefix): value for key, value in stored.data.items()})
    if data.get("sliding_window") == 0:
        data["sliding_window"] = None
    if architecture.model_type in _WIDTH_SCALED_LAYERS:
        data |= _gemma_settings(data, _WIDTH_SCALED_LAYERS[architecture.model_type])
    return Settings(data, where)


def _rotary_settings(
    architecture: GgufArchitecture, rotary_width: Any, head_width: int | None, where: str
) -> dict[str, Any]:
    """Return the setting of the rotated part of a head, if the architecture has one; else it must be all of it."""
    if rotary_width is None or head_width is None:
        return {}
    if architecture.partial_name is not None and isinstance(rotary_width, int):
        return {architecture.partial_name: rotary_width / head_width}
    if rotary_width != head_width:
        raise ClearheadError(
            f"{where}: {rotary_width} of {head_width} entries of a head are rotated; only full rotation is supported"
        )
    return {}


def _check_supported(
    stored: Settings, prefix: str, architecture: GgufArchitecture, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ClearheadError if a key asks for something unsupported."""
    with_tensors = {"rope.scaling.attn_factor"} if LONG_FACTORS in shapes else set()  # it belongs to LongRoPE
    known = {*architecture.keys, *architecture.constants, *with_tensors}
    for key, harmless_values in UNSUPPORTED.items():
        if key not in known:
            stored.allow_only(prefix + key, *harmless_values)
    for key, value in architecture.constants.items():
        stored.allow_only(prefix + key, value)


def to_plain_value(value: Any) -> Any:
    """Return NumPy arrays and scalars as lists and Python numbers, which compare with `==` and `in`.

    A 32-bit number becomes the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return [to_plain_value(entry) for entry in value]
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if single == value else value
    return value


_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # llama.cpp's defaults; it computes the magnitude from the factor


def rope_scaling(stored: Settings, prefix: str) -> dict[str, Any]:
    """Return `rope_scaling` as llama.cpp understands the keys.

    A factor without a type means linear scaling; its older key is `scale_linear`. Without a factor nothing is scaled.
    """
    factor = stored.data.get(prefix + "scaling.factor", stored.data.get(prefix + "scale_linear"))
    rope_type = stored.string(prefix + "scaling.type", "linear")
    if factor is None or rope_type == "none":
        return {}
    original = stored.data.get(prefix + "scaling.original_context_length")
    scaling = {"rope_type": rope_type, "factor": factor, "original_max_position_embeddings": original}
    if rope_type == "yarn":
        scaling |= {name: stored.number(f"{prefix}scaling.yarn_{name}", default) for name, default in _YARN.items()}
    return scaling


def _head_width_of(data: Mapping[str, Any]) -> int | None:
    """Return the stored head width, or else width / heads; None if neither is known."""
    width, num_heads = data.get("hidden_size"), data.get("num_attention_heads")
    if "head_dim" in data or not isinstance(width, int) or not isinstance(num_heads, int) or num_heads < 1:
        return data.get("head_dim")
    return width // num_heads


_WIDTH_SCALED_LAYERS = {"gemma3_text": 62, "gemma2": 46}  # number of layers of the 27B models


def _gemma_settings(data: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the score scale, which llama.cpp hard-codes: by width / heads for the 27B model, else by head width."""
    by_width = _head_width_of({key: value for key, value in data.items() if key != "head_dim"})
    return {"query_pre_attn_scalar": by_width if data.get("num_hidden_layers") == num_layers else data.get("head_dim")}
