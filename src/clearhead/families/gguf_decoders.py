"""The GGUF architectures of decoders without experts, as rows of a table.

    DECODERS["phi3"].tensor_names["blk.{layer}.attn_qkv.weight"]

gguf_row.py says what a row means.
"""

from collections.abc import Mapping
from typing import Any

from clearhead.architecture import ModelConfig
from clearhead.families.gguf_row import (
    ATTENTION,
    BIASES,
    BRANCH_NORMS,
    FUSED_GATE,
    FUSED_PROJECTIONS,
    GPT2_KEYS,
    GPT2_NAMES,
    GRANITE_SCALES,
    HEAD_NORMS,
    INTERLEAVED,
    JOINT_HEAD_NORMS,
    LONG_FACTORS,
    NORMS,
    OUTER,
    PARTIAL,
    PATTERN,
    PROJECTIONS,
    RMS_NORM,
    SHORT_FACTORS,
    SIZES,
    WINDOW,
    GgufArchitecture,
    in_layers,
    layer_norm,
    layer_types,
    with_one_added,
    write_layer_types,
)
from clearhead.families.tensor_rules import LAYER, Copy, NameTable, SingleRow, with_biases

_NEMOTRON_NAMES = {**PROJECTIONS, **with_one_added(PROJECTIONS)}
_GEMMA_NAMES = {**PROJECTIONS, **BRANCH_NORMS, **HEAD_NORMS}
_GEMMA_NAMES = {**_GEMMA_NAMES, **with_one_added(_GEMMA_NAMES)}
_GLM_NAMES = {**OUTER, **FUSED_GATE, **in_layers({**ATTENTION, "ffn_down": "feed_forward.down", **NORMS})}
_OLMO_NAMES = {**PROJECTIONS, **BRANCH_NORMS, **JOINT_HEAD_NORMS}
_SEED_NAMES = {
    **PROJECTIONS,
    "blk.{layer}.post_attention_norm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
}
del _SEED_NAMES["blk.{layer}.ffn_norm.weight"]
_FALCON_NAMES = {
    **FUSED_PROJECTIONS,
    **in_layers({"ffn_up": "feed_forward.up"}),
    **{
        f"blk.{{layer}}.attn_norm.{part}": (
            Copy((f"{LAYER}.attention_residual.norm.{part}",), only_placements=("parallel",)),
            Copy((f"{LAYER}.feed_forward_residual.norm.{part}",), only_placements=("parallel_norms",)),
        )
        for part in ("weight", "bias")
    },
    **{
        f"blk.{{layer}}.attn_norm_2.{part}": Copy(
            (f"{LAYER}.attention_residual.norm.{part}",), only_placements=("parallel_norms",)
        )
        for part in ("weight", "bias")
    },
}
del _FALCON_NAMES["blk.{layer}.ffn_norm.weight"], _FALCON_NAMES["blk.{layer}.ffn_norm.bias"]
_ACTIVATION = f"{LAYER}.feed_forward.activation"
_XIELU: NameTable = {
    "xielu.alpha_p": f"{_ACTIVATION}.positive",
    "xielu.alpha_n": f"{_ACTIVATION}.negative",
    "xielu.beta": SingleRow((f"{_ACTIVATION}.beta",)),  # no vector, but a number
    "xielu.eps": SingleRow((f"{_ACTIVATION}.epsilon",)),
}


def _read_falcon(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the number of key-value heads: with several, or with two norms, the architecture is new."""
    has_two_norms, num_kv_heads = settings["new_decoder_architecture"], settings.get("num_kv_heads")
    return {
        "new_decoder_architecture": has_two_norms or num_kv_heads not in (1, settings.get("num_attention_heads")),
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": num_kv_heads == 1,
    }


def _four_times_the_width(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the width of the feed-forward, which config.json does not have."""
    return {"feed_forward_length": 4 * config.width}


def _read_mpt(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of attention, which config.json has in an object."""
    max_bias = settings.get("alibi_bias_max") or 0
    return {
        "attn_config": {
            "alibi": max_bias != 0,
            "alibi_bias_max": max_bias,
            "clip_qkv": settings.get("clip_qkv") or None,
        }
    }


def _write_mpt(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    attention = data["attn_config"]
    keys = {"feed_forward_length": 4 * config.width, "attention.max_alibi_bias": float(attention["alibi_bias_max"])}
    return keys | ({} if attention["clip_qkv"] is None else {"attention.clamp_kqv": attention["clip_qkv"]})


def _read_olmo3(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers have the window, and that these have the same rotary base, but never a scaling of it."""
    sliding = {"rope_type": "default"}
    theta = {} if settings.get("rope_theta") is None else {"rope_theta": settings["rope_theta"]}
    return {**layer_types(settings, stored), "rope_parameters": {"sliding_attention": sliding | theta}}


def _write_olmo3(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the period of the layers without a window, as one number.

    llama.cpp does not read a list of these layers; it then assumes a period of 4.
    """
    types = data["layer_types"]
    every = types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
    return {"attention.sliding_window_pattern": every}


_Architecture = GgufArchitecture

DECODERS = {
    "llama": _Architecture("llama", INTERLEAVED, RMS_NORM),
    "qwen2": _Architecture("qwen2", PROJECTIONS, RMS_NORM | PATTERN),
    "qwen3": _Architecture("qwen3", {**PROJECTIONS, **HEAD_NORMS}, RMS_NORM | PATTERN),
    "gemma3": _Architecture("gemma3_text", _GEMMA_NAMES, RMS_NORM | PATTERN),
    "gpt2": _Architecture("gpt2", GPT2_NAMES, GPT2_KEYS),
    "gemma": _Architecture("gemma", _GEMMA_NAMES, RMS_NORM),
    "gemma2": _Architecture(
        "gemma2",
        _GEMMA_NAMES,
        RMS_NORM
        | WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "phi2": _Architecture("phi", PROJECTIONS, layer_norm("layer_norm_eps"), partial_name=PARTIAL),
    "phi3": _Architecture(
        "phi3",
        {**FUSED_PROJECTIONS, **FUSED_GATE},
        RMS_NORM | WINDOW,
        partial_name=PARTIAL,
        rotary_tensors=(LONG_FACTORS, SHORT_FACTORS),
    ),
    "gptneox": _Architecture(
        "gpt_neox",
        {**FUSED_PROJECTIONS, **in_layers({"ffn_up": "feed_forward.up"})},
        layer_norm("layer_norm_eps")
        | {"rope.freq_base": "rotary_emb_base", "use_parallel_residual": "use_parallel_residual"},
        partial_name="rotary_pct",
    ),
    "starcoder2": _Architecture(
        "starcoder2", PROJECTIONS, layer_norm("norm_epsilon") | WINDOW, flags={"use_bias": "blk.0.attn_output.bias"}
    ),
    "stablelm": _Architecture(
        "stablelm",
        {**PROJECTIONS, **HEAD_NORMS},
        layer_norm("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
        partial_name=PARTIAL,
    ),
    "nemotron": _Architecture("nemotron", _NEMOTRON_NAMES, layer_norm("norm_eps"), partial_name=PARTIAL),
    "olmo": _Architecture(
        "olmo",
        INTERLEAVED,
        SIZES | {"attention.clamp_kqv": "clip_qkv"},
        constants={"attention.layer_norm_epsilon": 1e-5},
    ),
    "olmo2": _Architecture("olmo2", _OLMO_NAMES, RMS_NORM, only_if={"attention.sliding_window": (None, 0)}),
    "olmo3": _Architecture(
        "olmo3",
        _OLMO_NAMES,
        RMS_NORM | WINDOW,
        read=_read_olmo3,
        write=_write_olmo3,
        stored_name="olmo2",
    ),
    "command-r": _Architecture(
        "cohere",
        {**PROJECTIONS, **HEAD_NORMS},
        layer_norm("layer_norm_eps") | {"logit_scale": "logit_scale"},
        flags=BIASES | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": _Architecture(
        "cohere2", PROJECTIONS, layer_norm("layer_norm_eps") | WINDOW | {"logit_scale": "logit_scale"}
    ),
    "granite": _Architecture("granite", INTERLEAVED, RMS_NORM | GRANITE_SCALES),
    "glm4": _Architecture(
        "glm4",
        {**_GLM_NAMES, **BRANCH_NORMS},
        RMS_NORM,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        partial_name=PARTIAL,
    ),
    "smollm3": _Architecture("smollm3", INTERLEAVED, RMS_NORM),
    "arcee": _Architecture("arcee", INTERLEAVED, RMS_NORM),
    "seed_oss": _Architecture(
        "seed_oss",
        _SEED_NAMES,
        RMS_NORM,
        flags=BIASES | {"attention_bias": "blk.0.attn_q.bias", "attention_out_bias": "blk.0.attn_output.bias"},
    ),
    "ernie4_5": _Architecture("ernie4_5", PROJECTIONS, RMS_NORM, flags={"use_bias": "blk.0.attn_output.bias"}),
    "chatglm": _Architecture(
        "glm",
        _GLM_NAMES,
        RMS_NORM,
        flags={"attention_bias": "blk.0.attn_q.bias"},
        partial_name=PARTIAL,
        only_with="blk.0.attn_q.weight",
    ),
    "chatglm-fused": _Architecture(  # made of releases for the older class ChatGLMModel
        "glm",
        {**FUSED_PROJECTIONS, **FUSED_GATE},
        RMS_NORM,
        flags={"attention_bias": "blk.0.attn_qkv.bias"},
        partial_name=PARTIAL,
        stored_name="chatglm",
    ),
    "exaone4": _Architecture(
        "exaone4",
        {**PROJECTIONS, **BRANCH_NORMS, **HEAD_NORMS},
        RMS_NORM | WINDOW,
        defaults={"sliding_window": None},
        read=layer_types,
        write=write_layer_types,
    ),
    "falcon": _Architecture(
        "falcon",
        _FALCON_NAMES,
        layer_norm("layer_norm_epsilon")
        | {"attention.head_count_kv": "num_kv_heads", "feed_forward_length": "ffn_hidden_size"},
        flags={"new_decoder_architecture": "blk.0.attn_norm_2.weight"},
        fixed={"parallel_attn": True, "bias": False},
        constants={"tensor_data_layout": "jploski"},
        read=_read_falcon,
    ),
    "bloom": _Architecture(
        "bloom",
        {**GPT2_NAMES, **with_biases({"token_embd_norm": "decoder.embedding.norm"})},
        GPT2_KEYS | {"context_length": "seq_length", "embedding_length": "hidden_size"},
        write=_four_times_the_width,
    ),
    "mpt": _Architecture(
        "mpt",
        GPT2_NAMES,
        {
            "context_length": "max_seq_len",
            "embedding_length": "d_model",
            "block_count": "n_layers",
            "attention.head_count": "n_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "attention.clamp_kqv": "clip_qkv",
            "attention.max_alibi_bias": "alibi_bias_max",
        },
        read=_read_mpt,
        write=_write_mpt,
    ),
    "starcoder": _Architecture(
        "gpt_bigcode",
        GPT2_NAMES,
        GPT2_KEYS,
        fixed={"multi_query": True},
        constants={"attention.head_count_kv": 1},
    ),
    "hunyuan-dense": _Architecture("hunyuan_v1_dense", {**PROJECTIONS, **HEAD_NORMS}, RMS_NORM),
    "apertus": _Architecture(
        "apertus",
        {
            **PROJECTIONS,
            **HEAD_NORMS,
            **{f"blk.{{layer}}.{key}": rule for key, rule in _XIELU.items()},
        },
        RMS_NORM,
        fixed={"rope_parameters": {"rope_type": "default"}},
        in_metadata={f"blk.{{layer}}.{key}": key for key in _XIELU},
    ),
}  # fmt: skip
