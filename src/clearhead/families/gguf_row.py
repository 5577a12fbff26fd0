"""What one row of the GGUF tables means, and the keys and tensor names that the rows share.

    GgufArchitecture("llama", INTERLEAVED, RMS_NORM)

Keys and tensor names are those of the `gguf` package (constants.py). What llama.cpp's converter changes in a tensor is
a rule: it stores the rotary pairs of LLaMA and some relatives as neighboring rows, adds 1 to the norm weights of Gemma
and Nemotron, transposes GPT-2's matrices, and stacks experts. What its graphs compute without a key is in `fixed`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.families.tensor_rules import (
    LAYER,
    QKV_BIASES,
    QKV_WEIGHTS,
    Fused,
    Interleaved,
    NameTable,
    OneRow,
    PlusOne,
    TensorRule,
    with_biases,
)

# Tensors of numbers by which rotary frequencies are divided: Llama 3's, and LongRoPE's. They belong to the config;
# checkpoint/gguf_rotary.py reads and writes them.
ROTARY_DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

# GGUF key without the leading "<architecture>." -> transformers' setting
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
RMS_NORM = {**SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
WINDOW = {"attention.sliding_window": "sliding_window"}
PATTERN = {
    **WINDOW,
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


def layer_norm(setting: str) -> dict[str, str]:
    """Return the keys of an architecture with LayerNorms, whose epsilon is this setting of transformers."""
    return {**SIZES, "attention.layer_norm_epsilon": setting}


ATTENTION = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
}
FEED_FORWARD = {"ffn_gate": "feed_forward.gate", "ffn_up": "feed_forward.up", "ffn_down": "feed_forward.down"}
NORMS = {"attn_norm": "attention_residual.norm", "ffn_norm": "feed_forward_residual.norm"}


def in_layers(modules: Mapping[str, str]) -> NameTable:
    """Return entries for weight and bias of modules of every layer, given as foreign name -> our name."""
    return with_biases({f"blk.{{layer}}.{theirs}": f"{LAYER}.{ours}" for theirs, ours in modules.items()})


OUTER: NameTable = with_biases(
    {"token_embd": "decoder.embedding.tokens", "output_norm": "decoder.final_norm", "output": "head"}
)
PROJECTIONS: NameTable = {**OUTER, **in_layers({**ATTENTION, **FEED_FORWARD, **NORMS})}


def _with_queries_and_keys(rule: Callable[[tuple[str, ...]], TensorRule]) -> NameTable:
    """Return the names of a LLaMA with this rule for the query and key projections."""
    changed = {
        f"blk.{{layer}}.{theirs}.{part}": rule((f"{LAYER}.{ATTENTION[theirs]}.{part}",))
        for theirs in ("attn_q", "attn_k")
        for part in ("weight", "bias")
    }
    return {**PROJECTIONS, **changed}


def with_one_added(names: NameTable) -> NameTable:
    """Return the entries of norm weights in a table, to which 1 was added."""
    return {
        name: PlusOne((rule,)) for name, rule in names.items() if isinstance(rule, str) and name.endswith("norm.weight")
    }


INTERLEAVED = _with_queries_and_keys(Interleaved)
HEAD_NORMS = in_layers({"attn_q_norm": "attention.query_norm", "attn_k_norm": "attention.key_norm"})
JOINT_HEAD_NORMS = in_layers({"attn_q_norm": "attention.query_norm.norm", "attn_k_norm": "attention.key_norm.norm"})
BRANCH_NORMS = in_layers(
    {"post_attention_norm": "attention_residual.branch_norm", "post_ffw_norm": "feed_forward_residual.branch_norm"}
)
FUSED_QKV: NameTable = {
    "blk.{layer}.attn_qkv.weight": Fused(QKV_WEIGHTS),
    "blk.{layer}.attn_qkv.bias": Fused(QKV_BIASES),
}
FUSED_GATE: NameTable = {
    "blk.{layer}.ffn_up.weight": Fused((f"{LAYER}.feed_forward.gate.weight", f"{LAYER}.feed_forward.up.weight"))
}
FUSED_PROJECTIONS: NameTable = {
    **OUTER,
    **FUSED_QKV,
    **in_layers({"attn_output": "attention.output", "ffn_down": "feed_forward.down", **NORMS}),
}
EXPERT_NAMES: NameTable = {
    "blk.{layer}.ffn_gate_inp.weight": f"{LAYER}.feed_forward.router.weight",
    **{f"blk.{{layer}}.ffn_{part}_exps.weight": f"{LAYER}.feed_forward.{part}" for part in ("gate", "up", "down")},
}
SHARED_EXPERT: NameTable = {
    f"blk.{{layer}}.ffn_{part}_shexp.weight": f"{LAYER}.feed_forward.shared.{part}.weight"
    for part in ("gate", "up", "down")
}
SHARED_GATE: NameTable = {
    "blk.{layer}.ffn_gate_inp_shexp.weight": OneRow((f"{LAYER}.feed_forward.shared_gate.weight",))
}
GPT2_NAMES: NameTable = {
    **FUSED_PROJECTIONS,
    **in_layers({"ffn_up": "feed_forward.up"}),
    "position_embd.weight": "decoder.embedding.positions.weight",
}

BIASES = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}


def _nothing_more(settings: dict[str, Any], other: Any) -> dict[str, Any]:
    """Return no settings and no keys."""
    return {}


@dataclass(frozen=True)
class GgufArchitecture:
    """How the files of one GGUF architecture correspond to a family."""

    model_type: str  # of the family in transformers, for `family_of_type`
    tensor_names: NameTable
    keys: Mapping[str, str]  # metadata key without the architecture's name -> transformers' setting
    flags: Mapping[str, str] = field(default_factory=lambda: BIASES)  # setting -> the tensor whose presence sets it
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that llama.cpp's graph implies
    constants: Mapping[str, Any] = field(default_factory=dict)  # keys that have the same value in all files
    partial_name: str | None = None  # setting of the rotated part of a head; None: all of it
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of absent keys, where transformers' differ
    yarn: Mapping[str, Any] = field(default_factory=dict)  # settings of YaRN that have no key
    only_if: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # of rows with one stored name: key -> values
    only_with: str | None = None  # a tensor without which the next row of the same stored name is meant
    # What needs more than a table: (settings so far, stored keys) -> more settings; (config.json, config) -> more keys
    read: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = _nothing_more
    write: Callable[[dict[str, Any], ModelConfig], dict[str, Any]] = _nothing_more
    splits_heads: bool = False  # attn_kv_b is stored as attn_k_b and attn_v_b (checkpoint/gguf_parts.py)
    in_metadata: Mapping[str, str] = field(default_factory=dict)  # name of a vector per layer -> the key of its numbers
    ignored_tensors: tuple[str, ...] = ()
    rotary_tensors: tuple[str, ...] = (ROTARY_DIVISORS,)  # that llama.cpp reads for this architecture
    stored_name: str | None = None  # in files, if it is not the key of the table


PARTIAL = "partial_rotary_factor"
_MAX_LAYERS = 10000  # more cannot be in a file


def layer_types(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have the window: listed in the file, or all but every n-th; without a key, transformers'."""
    pattern, num_layers = stored.get("attention.sliding_window_pattern"), settings.get("num_hidden_layers")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and isinstance(num_layers, int) and pattern > 0:
        pattern = [(index + 1) % pattern != 0 for index in range(min(num_layers, _MAX_LAYERS))]
    if pattern is None and settings.get("sliding_window"):
        return {}
    if pattern is None and isinstance(num_layers, int):
        pattern = [False] * min(num_layers, _MAX_LAYERS)
    if not isinstance(pattern, list):
        raise ClearheadError(f"attention.sliding_window_pattern of the GGUF file is {pattern!r:.40}; it must be a list")
    return {"layer_types": ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern]}


def write_layer_types(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return which layers have the window, if there are such."""
    is_windowed = [kind == "sliding_attention" for kind in data.get("layer_types") or []]
    return {"attention.sliding_window_pattern": is_windowed} if any(is_windowed) else {}
