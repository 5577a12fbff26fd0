"""The GGUF architectures of decoders with mixtures of experts, as rows of a table.

    MIXTURES["gpt-oss"].tensor_names["blk.{layer}.attn_sinks.weight"]

gguf_row.py says what a row means. Experts are stored as stacks. Files of DeepSeek-V2 and V3 have one architecture:
the router's function tells them apart.
"""

from collections.abc import Mapping
from typing import Any

from clearhead.architecture import ModelConfig
from clearhead.errors import ClearheadError
from clearhead.families.gguf_row import (
    ATTENTION,
    EXPERT_NAMES,
    EXPERT_WIDTH,
    EXPERTS,
    FEED_FORWARD,
    GRANITE_SCALES,
    HEAD_NORMS,
    INTERLEAVED,
    JOINT_HEAD_NORMS,
    LOCAL_EXPERTS,
    NORMS,
    OUTER,
    PARTIAL,
    PROJECTIONS,
    RMS_NORM,
    SHARED_EXPERT,
    SHARED_GATE,
    SHARED_WIDTH,
    WINDOW,
    GgufArchitecture,
    in_layers,
    layer_types,
    write_layer_types,
)
from clearhead.families.tensor_rules import LAYER, NUM_LAYERS_PLACEHOLDER, NameTable

_SIGMOID = 2  # number of the router's function in llama.cpp; 1 is softmax
_LATE_NORM: NameTable = {"blk.{layer}.post_attention_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight"}
_FEED_FORWARD_NORM = "blk.{layer}.ffn_norm.weight"
_EXPERT_BIASES: NameTable = {
    "blk.{layer}.ffn_gate_inp.bias": f"{LAYER}.feed_forward.router.bias",
    **{f"blk.{{layer}}.ffn_{part}_exps.bias": f"{LAYER}.feed_forward.{part}_bias" for part in ("gate", "up", "down")},
}
_SELECTION_BIAS: NameTable = {"blk.{layer}.exp_probs_b.bias": f"{LAYER}.feed_forward.router.selection_bias"}
_LATENT_NAMES: NameTable = {
    **OUTER,
    **in_layers(
        {
            "attn_q": "attention.query",
            "attn_q_a": "attention.query_down",
            "attn_q_a_norm": "attention.query_norm",
            "attn_q_b": "attention.query_up",
            "attn_kv_a_mqa": "attention.latent",
            "attn_kv_a_norm": "attention.latent_norm",
            "attn_kv_b": "attention.unfold",
            "attn_output": "attention.output",
            **NORMS,
            **FEED_FORWARD,
        }
    ),
    **EXPERT_NAMES,
    **SHARED_EXPERT,
    **_SELECTION_BIAS,
}
_ROUTER = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_ROUTER_DEFAULTS = {
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
# The layer that predicts the token after the next is counted and stored as one more block.
_NEXT_TOKEN_LAYERS = rf"blk\.{NUM_LAYERS_PLACEHOLDER}\..*"


def _read_router(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of layers without those that predict later tokens, and a scale of 1 if it is stored as 0."""
    num_layers, num_later = settings.get("num_hidden_layers"), stored.get("nextn_predict_layers", 0)
    more = {} if settings["routed_scaling_factor"] else {"routed_scaling_factor": 1.0}
    if isinstance(num_layers, int) and isinstance(num_later, int):
        more["num_hidden_layers"] = num_layers - num_later
    return more


# --- DeepSeek

_DEEPSEEK_KEYS = {
    **{key: value for key, value in RMS_NORM.items() if key not in ("attention.head_count_kv", "attention.key_length")},
    **EXPERT_WIDTH,
    **_ROUTER,
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}


def _read_deepseek(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the widths of heads, which older files have under other keys, and the two magnitudes of YaRN."""
    key_width, value_width = (
        stored.get(f"attention.{part}_length_mla", stored.get(f"attention.{part}_length")) for part in ("key", "value")
    )
    rotary_width, more = settings.get("qk_rope_head_dim"), _read_router(settings, stored)
    if not isinstance(key_width, int) or not isinstance(rotary_width, int) or key_width <= rotary_width:
        raise ClearheadError(
            f"the GGUF file has heads of width {key_width!r:.40}, of which {rotary_width!r:.40} are rotated; "
            "latent attention needs a wider head"
        )
    more |= {"qk_nope_head_dim": key_width - rotary_width, "v_head_dim": value_width}
    if settings["rope_scaling"].get("rope_type") == "yarn":
        multiplier = stored.get("rope.scaling.yarn_log_multiplier")
        if not isinstance(multiplier, float) or multiplier <= 0:
            raise ClearheadError("the GGUF file of a DeepSeek model scales by YaRN without yarn_log_multiplier")
        magnitude = round(10 * multiplier, 6)
        more["rope_scaling"] = settings["rope_scaling"] | {"mscale": magnitude, "mscale_all_dim": magnitude}
    return more


def _read_deepseek_v2(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    method = "greedy" if settings["n_group"] == 1 else "group_limited_greedy"
    return _read_deepseek(settings, stored) | {"topk_method": method}


def _write_deepseek(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the keys of latent attention, which llama.cpp computes with one key-value head of the latent's width."""
    latent, rotary = data["kv_lora_rank"], data["qk_rope_head_dim"]
    keys = {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotary,
        "attention.value_length": latent,
        "attention.key_length_mla": data["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": data["v_head_dim"],
        "expert_gating_func": 1 if data["model_type"] == "deepseek_v2" else _SIGMOID,
    }
    magnitude = data["rope_parameters"].get("mscale_all_dim")
    return keys | ({} if magnitude is None else {"rope.scaling.yarn_log_multiplier": 0.1 * magnitude})


# --- Llama 4


def _read_llama4(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what llama.cpp fixes: all but the model with 128 experts normalize heads."""
    return {"use_qk_norm": settings.get("num_local_experts") != 128}


def _write_llama4(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the distance of the layers with experts, and the width that a model without dense layers lacks."""
    width = data.get("intermediate_size_mlp", data.get("intermediate_size"))
    return {"interleave_moe_layer_step": data["moe_layers"][0] + 1, "feed_forward_length": width}


_Architecture = GgufArchitecture

MIXTURES = {
    "mixtral": _Architecture(
        "mixtral", {**INTERLEAVED, **EXPERT_NAMES}, RMS_NORM | LOCAL_EXPERTS, stored_name="llama"
    ),
    "granitemoe": _Architecture(
        "granitemoe", {**INTERLEAVED, **EXPERT_NAMES}, RMS_NORM | GRANITE_SCALES | LOCAL_EXPERTS
    ),
    "olmoe": _Architecture(
        "olmoe", {**PROJECTIONS, **EXPERT_NAMES, **JOINT_HEAD_NORMS}, RMS_NORM | EXPERTS,
        fixed={"norm_topk_prob": False},
    ),
    "qwen2moe": _Architecture(
        "qwen2_moe",
        {**PROJECTIONS, **EXPERT_NAMES, **SHARED_EXPERT, **SHARED_GATE},
        RMS_NORM | EXPERTS | EXPERT_WIDTH | SHARED_WIDTH,
        flags={"qkv_bias": "blk.0.attn_q.bias"},
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": _Architecture(
        "qwen3_moe",
        {**PROJECTIONS, **EXPERT_NAMES, **HEAD_NORMS},
        RMS_NORM | EXPERTS | EXPERT_WIDTH,
        fixed={"norm_topk_prob": True},
    ),
    "gpt-oss": _Architecture(
        "gpt_oss",
        {
            **OUTER,
            **in_layers({**ATTENTION, "attn_norm": "attention_residual.norm"}),
            **_LATE_NORM,
            **EXPERT_NAMES,
            **_EXPERT_BIASES,
            "blk.{layer}.attn_sinks.weight": f"{LAYER}.attention.sinks",
        },
        RMS_NORM | WINDOW | LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        fixed={"rope_parameters": {"rope_type": "default"}},
        yarn={"truncate": False},
        read=layer_types,
        write=write_layer_types,
    ),
    "glm4moe": _Architecture(
        "glm4_moe",
        {
            **OUTER,
            **in_layers({**ATTENTION, **FEED_FORWARD, "attn_norm": "attention_residual.norm"}),
            **_LATE_NORM,
            **HEAD_NORMS,
            **EXPERT_NAMES,
            **SHARED_EXPERT,
            **_SELECTION_BIAS,
        },
        RMS_NORM | EXPERT_WIDTH | _ROUTER,
        flags={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
        constants={"expert_gating_func": _SIGMOID},
        partial_name=PARTIAL,
        defaults=_ROUTER_DEFAULTS,
        read=_read_router,
        ignored_tensors=(_NEXT_TOKEN_LAYERS,),
    ),
    "deepseek2": _Architecture(
        "deepseek_v3",
        _LATENT_NAMES,
        _DEEPSEEK_KEYS,
        only_if={"expert_gating_func": (_SIGMOID,)},
        defaults={**_ROUTER_DEFAULTS, "q_lora_rank": None},
        read=_read_deepseek,
        write=_write_deepseek,
        splits_heads=True,
        ignored_tensors=(_NEXT_TOKEN_LAYERS,),
    ),
    "deepseek-v2": _Architecture(
        "deepseek_v2",
        _LATENT_NAMES,
        _DEEPSEEK_KEYS,
        only_if={"expert_gating_func": (1, None)},
        defaults={**_ROUTER_DEFAULTS, "q_lora_rank": None},
        read=_read_deepseek_v2,
        write=_write_deepseek,
        splits_heads=True,
        stored_name="deepseek2",
    ),
    "llama4": _Architecture(
        "llama4_text",
        {**PROJECTIONS, **EXPERT_NAMES, **SHARED_EXPERT},
        RMS_NORM
        | LOCAL_EXPERTS
        | {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        fixed={"attention_chunk_size": 8192},
        read=_read_llama4,
        write=_write_llama4,
    ),
}  # fmt: skip
