"""GGUF files: translate their metadata to transformers' settings and their tensor names to ours.

    settings = gguf_settings(metadata, shapes, where="model.gguf"); names = gguf_architecture(metadata).tensor_names

The keys are llama.cpp's (`gguf` package, constants.py). Its converter stores the rotary pairs of the `llama`
architecture as neighboring rows, adds 1 to Gemma's norm weights, and transposes GPT-2's matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from clearhead.errors import ClearheadError, quote
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import (
    LAYER,
    QKV_BIASES,
    QKV_WEIGHTS,
    Fused,
    Interleaved,
    NameTable,
    PlusOne,
    TensorRule,
)

# GGUF key without the leading "<architecture>." -> transformers' setting
_LLAMA_STYLE_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Keys that change the result and that none of these architectures uses -> the values that change nothing
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
    "rope.scaling.attn_factor": (1.0,),
}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_PROJECTIONS = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
    "ffn_gate": "feed_forward.gate",
    "ffn_up": "feed_forward.up",
    "ffn_down": "feed_forward.down",
}


def projections(query_key_rule: Callable[[tuple[str, ...]], TensorRule] | None = None) -> NameTable:
    """Return the names shared by all architectures with separate query, key and value.

    `query_key_rule` is the rule for the query and key projections; None: they are stored like ours.
    """
    table: dict[str, str | TensorRule] = {
        "token_embd.weight": "decoder.embedding.tokens.weight",
        "blk.{layer}.attn_norm.weight": f"{LAYER}.attention_residual.norm.weight",
        "blk.{layer}.ffn_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
        "output_norm.weight": "decoder.final_norm.weight",
        "output.weight": "head.weight",
    }
    for theirs, ours in _PROJECTIONS.items():
        for part in ("weight", "bias"):
            own_name = f"{LAYER}.{ours}.{part}"
            rule = query_key_rule if theirs in ("attn_q", "attn_k") else None
            table[f"blk.{{layer}}.{theirs}.{part}"] = rule((own_name,)) if rule else own_name
    return table


_HEAD_NORMS: NameTable = {
    "blk.{layer}.attn_q_norm.weight": f"{LAYER}.attention.query_norm.weight",
    "blk.{layer}.attn_k_norm.weight": f"{LAYER}.attention.key_norm.weight",
}
_GEMMA_NORMS: NameTable = {
    "blk.{layer}.attn_norm.weight": PlusOne((f"{LAYER}.attention_residual.norm.weight",)),
    "blk.{layer}.post_attention_norm.weight": PlusOne((f"{LAYER}.attention_residual.branch_norm.weight",)),
    "blk.{layer}.ffn_norm.weight": PlusOne((f"{LAYER}.feed_forward_residual.norm.weight",)),
    "blk.{layer}.post_ffw_norm.weight": PlusOne((f"{LAYER}.feed_forward_residual.branch_norm.weight",)),
    "blk.{layer}.attn_q_norm.weight": PlusOne((f"{LAYER}.attention.query_norm.weight",)),
    "blk.{layer}.attn_k_norm.weight": PlusOne((f"{LAYER}.attention.key_norm.weight",)),
    "output_norm.weight": PlusOne(("decoder.final_norm.weight",)),
}
GPT2_NAMES: NameTable = {
    "token_embd.weight": "decoder.embedding.tokens.weight",
    "position_embd.weight": "decoder.embedding.positions.weight",
    "blk.{layer}.attn_norm.weight": f"{LAYER}.attention_residual.norm.weight",
    "blk.{layer}.attn_norm.bias": f"{LAYER}.attention_residual.norm.bias",
    "blk.{layer}.attn_qkv.weight": Fused(QKV_WEIGHTS),
    "blk.{layer}.attn_qkv.bias": Fused(QKV_BIASES),
    "blk.{layer}.attn_output.weight": f"{LAYER}.attention.output.weight",
    "blk.{layer}.attn_output.bias": f"{LAYER}.attention.output.bias",
    "blk.{layer}.ffn_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "blk.{layer}.ffn_norm.bias": f"{LAYER}.feed_forward_residual.norm.bias",
    "blk.{layer}.ffn_up.weight": f"{LAYER}.feed_forward.up.weight",
    "blk.{layer}.ffn_up.bias": f"{LAYER}.feed_forward.up.bias",
    "blk.{layer}.ffn_down.weight": f"{LAYER}.feed_forward.down.weight",
    "blk.{layer}.ffn_down.bias": f"{LAYER}.feed_forward.down.bias",
    "output_norm.weight": "decoder.final_norm.weight",
    "output_norm.bias": "decoder.final_norm.bias",
    "output.weight": "head.weight",  # some converters store the token table a second time
}


@dataclass(frozen=True)
class GgufArchitecture:
    """How the files of one GGUF architecture correspond to a family."""

    model_type: str  # of the family in transformers, for `family_of_type`
    tensor_names: NameTable
    keys: Mapping[str, str]  # metadata key without the architecture's name -> transformers' setting
    # Llama 3's rotary scaling is stored as a tensor of divisors; checkpoint/gguf_model.py turns it into a config.
    ignored_tensors: tuple[str, ...] = (r"rope_freqs\.weight",)


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", projections(Interleaved), _LLAMA_STYLE_KEYS),
    "qwen2": GgufArchitecture("qwen2", projections(), _LLAMA_STYLE_KEYS),
    "qwen3": GgufArchitecture("qwen3", {**projections(), **_HEAD_NORMS}, _LLAMA_STYLE_KEYS),
    "gemma3": GgufArchitecture("gemma3_text", {**projections(), **_GEMMA_NORMS}, _LLAMA_STYLE_KEYS),
    "gpt2": GgufArchitecture("gpt2", GPT2_NAMES, _GPT2_KEYS),
}


def gguf_architecture(metadata: Mapping[str, Any]) -> GgufArchitecture:
    """Return the architecture that a file's metadata names."""
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ClearheadError(f"GGUF files of the architecture {quote(name)} are not supported; supported are {known}")
    return ARCHITECTURES[name]


def gguf_settings(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> Settings:
    """Return the settings that transformers' config.json of the same model would hold.

    `shapes` are the shapes of the stored tensors by their names.
    """
    architecture, prefix = gguf_architecture(metadata), f"{metadata['general.architecture']}."
    # without the vocabulary, which may be long
    stored = Settings({key: to_plain_value(value) for key, value in metadata.items() if key.startswith(prefix)}, where)
    _check_supported(stored, prefix, architecture)
    data: dict[str, Any] = {
        setting: stored.data[prefix + key] for key, setting in architecture.keys.items() if prefix + key in stored
    }
    rotary_width, head_width = stored.data.get(prefix + "rope.dimension_count"), _head_width_of(data)
    if rotary_width is not None and head_width is not None and rotary_width != head_width:
        raise ClearheadError(
            f"{where}: {rotary_width} of {head_width} entries of a head are rotated; only full rotation is supported"
        )
    vocab_size, *_ = shapes.get("token_embd.weight", (None,))
    data |= {"model_type": architecture.model_type, "vocab_size": vocab_size}
    data["tie_word_embeddings"] = "output.weight" not in shapes
    data["attention_bias"] = "blk.0.attn_output.bias" in shapes
    data["mlp_bias"] = "blk.0.ffn_down.bias" in shapes
    data["rope_scaling"] = rope_scaling(stored, prefix + "rope.")
    if architecture.model_type == "gemma3_text":
        data |= _gemma3_settings(data)
    return Settings(data, where)


def _check_supported(stored: Settings, prefix: str, architecture: GgufArchitecture) -> None:
    """Raise ClearheadError if a key asks for something unsupported."""
    for key, harmless_values in UNSUPPORTED.items():
        stored.allow_only(prefix + key, *harmless_values)
    if architecture.model_type == "llama":
        stored.allow_only(prefix + "attention.sliding_window", 0)


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


def rope_scaling(stored: Settings, prefix: str) -> dict[str, Any]:
    """Return `rope_scaling` as llama.cpp understands the keys.

    A factor without a type means linear scaling; its older key is `scale_linear`. Without a factor nothing is scaled.
    """
    factor = stored.data.get(prefix + "scaling.factor", stored.data.get(prefix + "scale_linear"))
    rope_type = stored.string(prefix + "scaling.type", "linear")
    if factor is None or rope_type == "none":
        return {}
    original = stored.data.get(prefix + "scaling.original_context_length")
    return {"rope_type": rope_type, "factor": factor, "original_max_position_embeddings": original}


def _head_width_of(data: Mapping[str, Any]) -> int | None:
    """Return the stored head width, or else width / heads; None if neither is known."""
    width, num_heads = data.get("hidden_size"), data.get("num_attention_heads")
    if "head_dim" in data or not isinstance(width, int) or not isinstance(num_heads, int) or num_heads < 1:
        return data.get("head_dim")
    return width // num_heads


def _gemma3_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score scale, which llama.cpp hard-codes: by width / heads for the 27B model, else by head width."""
    by_width = _head_width_of({key: value for key, value in data.items() if key != "head_dim"})
    return {"query_pre_attn_scalar": by_width if data.get("num_hidden_layers") == 62 else data.get("head_dim")}
