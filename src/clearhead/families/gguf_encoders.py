"""The GGUF architectures of encoders, which embed texts, and of T5, as rows of a table.

    ENCODERS["bert"].tensor_names["blk.{layer}.attn_output_norm.weight"]

gguf_row.py says what a row means. The files hold neither pooler nor language head. llama.cpp stores RoBERTa and
XLM-R as BERT, without the rows of their position table that no token uses; that is read, but not written.
"""

from collections.abc import Mapping
from typing import Any

from clearhead.architecture import ModelConfig
from clearhead.families.encoder_style import ENCODER_LAYER
from clearhead.families.gguf_row import ATTENTION, GgufArchitecture
from clearhead.families.tensor_rules import Fused, NameTable, with_biases

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_ROTARY = {"rope.freq_base": "rope_theta"}
_MODERN_KEYS = {
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.sliding_window": "local_attention",
    "attention.sliding_window_pattern": "global_attn_every_n_layers",
    "rope.freq_base": "global_rope_theta",
    "rope.freq_base_swa": "local_rope_theta",
    "hidden_act": "hidden_activation",
}


def _in_layers(modules: Mapping[str, str]) -> NameTable:
    return with_biases({f"blk.{{layer}}.{theirs}": f"{ENCODER_LAYER}.{ours}" for theirs, ours in modules.items()})


def _fused(name: str, *modules: str) -> NameTable:
    """Return the entries of weight and bias of a projection that holds several of ours."""
    return {
        f"blk.{{layer}}.{name}.{leaf}": Fused(tuple(f"{ENCODER_LAYER}.{module}.{leaf}" for module in modules))
        for leaf in ("weight", "bias")
    }


_EMBEDDING: NameTable = {
    "token_embd.weight": "encoder.embedding.tokens.weight",
    "token_types.weight": "encoder.embedding.types.weight",
    "position_embd.weight": "encoder.embedding.positions.weight",
    **with_biases({"token_embd_norm": "encoder.embedding.norm"}),
}
_LATE_NORMS = {"attn_output_norm": "attention_residual.norm", "layer_output_norm": "feed_forward_residual.norm"}
_OUTPUTS = {"attn_output": "attention.output", "ffn_down": "feed_forward.down"}
_QKV = _fused("attn_qkv", "attention.query", "attention.key", "attention.value")


def _read_types(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return that there is no rotary scaling: encoders have no such keys."""
    return {"rope_scaling": None}


def _write_types(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Return the number of token types, which llama.cpp wants to be one or more, and that tokens see later ones."""
    return {"attention.causal": False, "tokenizer.ggml.token_type_count": data.get("type_vocab_size") or 1}


def _read_modern(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer types: without a window, all layers see all tokens."""
    every = {} if settings.get("local_attention") else {"global_attn_every_n_layers": 1, "local_attention": 128}
    return {"rope_scaling": None, "rope_parameters": {}, **every}


def _write_modern(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    full, windowed = (data["rope_parameters"].get(f"{kind}_attention") for kind in ("full", "sliding"))
    types = data["layer_types"]
    every = next((number for number, kind in enumerate(types) if number and kind == "full_attention"), len(types))
    keys = {
        "attention.causal": False,
        "attention.sliding_window_pattern": every,
        "vocab_size": config.vocab_size,
        "rope.scaling.type": "none",
    }
    thetas = {"rope.freq_base": full, "rope.freq_base_swa": windowed}
    return keys | {key: rope["rope_theta"] for key, rope in thetas.items() if rope}


# --- T5


def _t5_stack(theirs: str, ours: str) -> NameTable:
    layer = f"{ours}.layers.{{layer}}"
    parts = {
        **{f"attn_{part[0]}": f"attention.{part}" for part in _PROJECTIONS},
        "attn_norm": "attention_residual.norm",
        **{f"cross_attn_{part[0]}": f"cross_attention.{part}" for part in _PROJECTIONS},
        "cross_attn_norm": "cross_attention_residual.norm",
        **{f"ffn_{part}": f"feed_forward.{part}" for part in ("gate", "up", "down")},
        "ffn_norm": "feed_forward_residual.norm",
    }
    return {
        **{f"{theirs}.blk.{{layer}}.{name}.weight": f"{layer}.{own}.weight" for name, own in parts.items()},
        f"{theirs}.blk.0.attn_rel_b.weight": f"{ours}.relative_bias.weight",
        f"{theirs}.blk.{{layer}}.attn_rel_b.weight": f"{layer}.attention.relative_bias.weight",  # UMT5
        f"{theirs}.output_norm.weight": f"{ours}.final_norm.weight",
    }


_PROJECTIONS = ("query", "key", "value", "output")
_T5_KEYS = {
    "context_length": "n_positions",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
}


_T5_FLAGS = {"is_gated_act": "enc.blk.0.ffn_gate.weight", "has_bias_per_layer": "enc.blk.1.attn_rel_b.weight"}


def _read_t5(settings: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation and the model type, which llama.cpp derives from the tensors that there are."""
    return {
        "model_type": "umt5" if settings["has_bias_per_layer"] else "t5",
        "feed_forward_proj": "gated-gelu" if settings["is_gated_act"] else "relu",
    }


def _write_t5(data: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    return {
        "attention.value_length": data["d_kv"],
        "attention.layer_norm_epsilon": data["layer_norm_epsilon"],
        "decoder_start_token_id": 0,  # that of padding, in all releases
    }


ENCODERS = {
    "bert": GgufArchitecture(
        "bert",
        {**_EMBEDDING, **_in_layers({**ATTENTION, **_OUTPUTS, "ffn_up": "feed_forward.up", **_LATE_NORMS})},
        _SIZES | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={},
        fixed={"add_pooling_layer": False, "hidden_act": "gelu"},
        constants={"attention.causal": False},
        read=_read_types,
        write=_write_types,
    ),
    "nomic-bert": GgufArchitecture(
        "nomic_bert",
        {
            **_EMBEDDING,
            **_QKV,
            **_in_layers({**_OUTPUTS, "ffn_up": "feed_forward.up", "ffn_gate": "feed_forward.gate", **_LATE_NORMS}),
        },
        _SIZES | _ROTARY | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        flags={},
        fixed={"add_pooling_layer": False},
        constants={"attention.causal": False},
        defaults={"rope_theta": 10000.0},
        read=_read_types,
        write=_write_types,
    ),
    "modern-bert": GgufArchitecture(
        "modernbert",
        {
            **_EMBEDDING,
            **_QKV,
            **_fused("ffn_up", "feed_forward.gate", "feed_forward.up"),
            **_in_layers(
                {**_OUTPUTS, "attn_norm": "attention_residual.norm", "ffn_norm": "feed_forward_residual.norm"}
            ),
            **with_biases({"output_norm": "encoder.final_norm"}),
        },
        _SIZES | _MODERN_KEYS,
        flags={},
        constants={"attention.causal": False},
        defaults={"global_rope_theta": 10000.0, "local_rope_theta": 10000.0},
        read=_read_modern,
        write=_write_modern,
    ),
    "t5": GgufArchitecture(
        "t5",
        {
            "token_embd.weight": "encoder.embedding.tokens.weight",
            "output.weight": "head.weight",
            **_t5_stack("enc", "encoder"),
            **_t5_stack("dec", "decoder"),
        },
        _T5_KEYS | {"decoder_block_count": "num_decoder_layers"},
        flags=_T5_FLAGS,
        read=_read_t5,
        write=_write_t5,
        ignored_tensors=(r"dec\.blk\.0\.cross_attn_rel_b\.weight",),  # in files of early releases; nothing uses it
    ),
    "t5encoder": GgufArchitecture(
        "t5",
        {"token_embd.weight": "encoder.embedding.tokens.weight", **_t5_stack("enc", "encoder")},
        _T5_KEYS,
        flags=_T5_FLAGS,
        fixed={"architectures": ["T5EncoderModel"]},
        read=_read_t5,
        write=lambda data, config: {"attention.value_length": data["d_kv"], "attention.causal": False},
        constants={"attention.causal": False},
    ),
}
