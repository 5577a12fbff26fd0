"""The architectures of GGUF files as a table: their metadata keys, tensor names, and what llama.cpp fixes.

    ARCHITECTURES["phi3"].tensor_names["blk.{layer}.attn_qkv.weight"]

Keys and tensor names are those of the `gguf` package (constants.py). What llama.cpp's converter changes in a tensor is
a rule: it stores the rotary pairs of LLaMA and some relatives as neighboring rows, adds 1 to the norm weights of Gemma
and Nemotron, transposes GPT-2's matrices, and stacks experts. What its graphs compute without a key is in `fixed`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

# GGUF key without the leading "<architecture>." -> transformers' setting
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_RMS_NORM = {**_SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_PATTERN = {
    **_WINDOW,
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GRANITE_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}


def _layer_norm(setting: str) -> dict[str, str]:
    """Return the keys of an architecture with LayerNorms, whose epsilon is this setting of transformers."""
    return {**_SIZES, "attention.layer_norm_epsilon": setting}


_ATTENTION = {
    "attn_q": "attention.query",
    "attn_k": "attention.key",
    "attn_v": "attention.value",
    "attn_output": "attention.output",
}
_FEED_FORWARD = {"ffn_gate": "feed_forward.gate", "ffn_up": "feed_forward.up", "ffn_down": "feed_forward.down"}
_NORMS = {"attn_norm": "attention_residual.norm", "ffn_norm": "feed_forward_residual.norm"}


def _in_layers(modules: Mapping[str, str]) -> NameTable:
    """Return entries for weight and bias of modules of every layer, given as foreign name -> our name."""
    return with_biases({f"blk.{{layer}}.{theirs}": f"{LAYER}.{ours}" for theirs, ours in modules.items()})


_OUTER: NameTable = with_biases(
    {"token_embd": "decoder.embedding.tokens", "output_norm": "decoder.final_norm", "output": "head"}
)
PROJECTIONS: NameTable = {**_OUTER, **_in_layers({**_ATTENTION, **_FEED_FORWARD, **_NORMS})}


def _with_queries_and_keys(rule: Callable[[tuple[str, ...]], TensorRule]) -> NameTable:
    """Return the names of a LLaMA with this rule for the query and key projections."""
    changed = {
        f"blk.{{layer}}.{theirs}.{part}": rule((f"{LAYER}.{_ATTENTION[theirs]}.{part}",))
        for theirs in ("attn_q", "attn_k")
        for part in ("weight", "bias")
    }
    return {**PROJECTIONS, **changed}


def _with_one_added(names: NameTable) -> NameTable:
    """Return the entries of norm weights in a table, to which 1 was added."""
    return {
        name: PlusOne((rule,)) for name, rule in names.items() if isinstance(rule, str) and name.endswith("norm.weight")
    }


_INTERLEAVED = _with_queries_and_keys(Interleaved)
_HEAD_NORMS = _in_layers({"attn_q_norm": "attention.query_norm", "attn_k_norm": "attention.key_norm"})
_JOINT_HEAD_NORMS = _in_layers({"attn_q_norm": "attention.query_norm.norm", "attn_k_norm": "attention.key_norm.norm"})
_BRANCH_NORMS = _in_layers(
    {"post_attention_norm": "attention_residual.branch_norm", "post_ffw_norm": "feed_forward_residual.branch_norm"}
)
_FUSED_QKV: NameTable = {
    "blk.{layer}.attn_qkv.weight": Fused(QKV_WEIGHTS),
    "blk.{layer}.attn_qkv.bias": Fused(QKV_BIASES),
}
_FUSED_GATE: NameTable = {
    "blk.{layer}.ffn_up.weight": Fused((f"{LAYER}.feed_forward.gate.weight", f"{LAYER}.feed_forward.up.weight"))
}
_FUSED_PROJECTIONS: NameTable = {
    **_OUTER,
    **_FUSED_QKV,
    **_in_layers({"attn_output": "attention.output", "ffn_down": "feed_forward.down", **_NORMS}),
}
_EXPERT_NAMES: NameTable = {
    "blk.{layer}.ffn_gate_inp.weight": f"{LAYER}.feed_forward.router.weight",
    **{f"blk.{{layer}}.ffn_{part}_exps.weight": f"{LAYER}.feed_forward.{part}" for part in ("gate", "up", "down")},
}
_SHARED_EXPERT: NameTable = {
    **{
        f"blk.{{layer}}.ffn_{part}_shexp.weight": f"{LAYER}.feed_forward.shared.{part}.weight"
        for part in ("gate", "up", "down")
    },
    "blk.{layer}.ffn_gate_inp_shexp.weight": OneRow((f"{LAYER}.feed_forward.shared_gate.weight",)),
}
GPT2_NAMES: NameTable = {
    **_FUSED_PROJECTIONS,
    **_in_layers({"ffn_up": "feed_forward.up"}),
    "position_embd.weight": "decoder.embedding.positions.weight",
}

_BIASES = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}


@dataclass(frozen=True)
class GgufArchitecture:
    """How the files of one GGUF architecture correspond to a family."""

    model_type: str  # of the family in transformers, for `family_of_type`
    tensor_names: NameTable
    keys: Mapping[str, str]  # metadata key without the architecture's name -> transformers' setting
    flags: Mapping[str, str] = field(default_factory=lambda: _BIASES)  # setting -> the tensor whose presence sets it
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that llama.cpp's graph implies
    constants: Mapping[str, Any] = field(default_factory=dict)  # keys that have the same value in all files
    partial_name: str | None = None  # setting of the rotated part of a head; None: all of it
    # Llama 3's rotary scaling is stored as a tensor of divisors; checkpoint/gguf_model.py turns it into a config.
    ignored_tensors: tuple[str, ...] = (r"rope_freqs\.weight",)
    stored_name: str | None = None  # in files, if it is not the key of the table


_PARTIAL = "partial_rotary_factor"
_NEMOTRON_NAMES = {**PROJECTIONS, **_with_one_added(PROJECTIONS)}
_GEMMA_NAMES = {**PROJECTIONS, **_BRANCH_NORMS, **_HEAD_NORMS}
_GEMMA_NAMES = {**_GEMMA_NAMES, **_with_one_added(_GEMMA_NAMES)}
_GLM_NAMES = {**_OUTER, **_FUSED_GATE, **_in_layers({**_ATTENTION, "ffn_down": "feed_forward.down", **_NORMS})}
_SEED_NAMES = {
    **PROJECTIONS,
    "blk.{layer}.post_attention_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
}
del _SEED_NAMES["blk.{layer}.ffn_norm.weight"]
_Architecture = GgufArchitecture

ARCHITECTURES = {
    "llama": _Architecture("llama", _INTERLEAVED, _RMS_NORM),
    "qwen2": _Architecture("qwen2", PROJECTIONS, _RMS_NORM | _PATTERN),
    "qwen3": _Architecture("qwen3", {**PROJECTIONS, **_HEAD_NORMS}, _RMS_NORM | _PATTERN),
    "gemma3": _Architecture("gemma3_text", _GEMMA_NAMES, _RMS_NORM | _PATTERN),
    "gpt2": _Architecture("gpt2", GPT2_NAMES, _GPT2_KEYS),
    "gemma": _Architecture("gemma", _GEMMA_NAMES, _RMS_NORM),
    "gemma2": _Architecture(
        "gemma2",
        _GEMMA_NAMES,
        _RMS_NORM
        | _WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "phi2": _Architecture("phi", PROJECTIONS, _layer_norm("layer_norm_eps"), partial_name=_PARTIAL),
    "phi3": _Architecture("phi3", {**_FUSED_PROJECTIONS, **_FUSED_GATE}, _RMS_NORM | _WINDOW, partial_name=_PARTIAL),
    "gptneox": _Architecture(
        "gpt_neox",
        {**_FUSED_PROJECTIONS, **_in_layers({"ffn_up": "feed_forward.up"})},
        _layer_norm("layer_norm_eps")
        | {"rope.freq_base": "rotary_emb_base", "use_parallel_residual": "use_parallel_residual"},
        partial_name="rotary_pct",
    ),
    "starcoder2": _Architecture(
        "starcoder2", PROJECTIONS, _layer_norm("norm_epsilon"), flags={"use_bias": "blk.0.attn_output.bias"}
    ),
    "stablelm": _Architecture(
        "stablelm",
        {**PROJECTIONS, **_HEAD_NORMS},
        _layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
        partial_name=_PARTIAL,
    ),
    "nemotron": _Architecture("nemotron", _NEMOTRON_NAMES, _layer_norm("norm_eps"), partial_name=_PARTIAL),
    "olmo": _Architecture(
        "olmo",
        _INTERLEAVED,
        _SIZES | {"attention.clamp_kqv": "clip_qkv"},
        constants={"attention.layer_norm_epsilon": 1e-5},
    ),
    "olmo2": _Architecture("olmo2", {**PROJECTIONS, **_BRANCH_NORMS, **_JOINT_HEAD_NORMS}, _RMS_NORM),
    "command-r": _Architecture(
        "cohere",
        {**PROJECTIONS, **_HEAD_NORMS},
        _layer_norm("layer_norm_eps") | {"logit_scale": "logit_scale"},
        flags=_BIASES | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": _Architecture(
        "cohere2", PROJECTIONS, _layer_norm("layer_norm_eps") | _WINDOW | {"logit_scale": "logit_scale"}
    ),
    "granite": _Architecture("granite", _INTERLEAVED, _RMS_NORM | _GRANITE_SCALES),
    "glm4": _Architecture(
        "glm4",
        {**_GLM_NAMES, **_BRANCH_NORMS},
        _RMS_NORM,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        partial_name=_PARTIAL,
    ),
    "smollm3": _Architecture("smollm3", _INTERLEAVED, _RMS_NORM),
    "arcee": _Architecture("arcee", _INTERLEAVED, _RMS_NORM),
    "seed_oss": _Architecture(
        "seed_oss",
        _SEED_NAMES,
        _RMS_NORM,
        flags=_BIASES | {"attention_bias": "blk.0.attn_q.bias", "attention_out_bias": "blk.0.attn_output.bias"},
    ),
    "ernie4_5": _Architecture("ernie4_5", PROJECTIONS, _RMS_NORM, flags={"use_bias": "blk.0.attn_output.bias"}),
    "mixtral": _Architecture(
        "mixtral", {**_INTERLEAVED, **_EXPERT_NAMES}, _RMS_NORM | _LOCAL_EXPERTS, stored_name="llama"
    ),
    "granitemoe": _Architecture(
        "granitemoe", {**_INTERLEAVED, **_EXPERT_NAMES}, _RMS_NORM | _GRANITE_SCALES | _LOCAL_EXPERTS
    ),
    "olmoe": _Architecture(
        "olmoe", {**PROJECTIONS, **_EXPERT_NAMES, **_JOINT_HEAD_NORMS}, _RMS_NORM | _EXPERTS,
        fixed={"norm_topk_prob": False},
    ),
    "qwen2moe": _Architecture(
        "qwen2_moe",
        {**PROJECTIONS, **_EXPERT_NAMES, **_SHARED_EXPERT},
        _RMS_NORM | _EXPERTS | _EXPERT_WIDTH | _SHARED_WIDTH,
        flags={"qkv_bias": "blk.0.attn_q.bias"},
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        {**PROJECTIONS, **_EXPERT_NAMES, **_HEAD_NORMS},
        _RMS_NORM | _EXPERTS | _EXPERT_WIDTH,
        fixed={"norm_topk_prob": True},
    ),
}  # fmt: skip
