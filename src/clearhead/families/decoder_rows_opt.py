"""OPT, XGLM and Falcon as rows of the decoder table.

Sources: Zhang et al. 2022; Lin et al. 2021; Almazrouei et al. 2023; transformers' classes, and the config.json of the
releases that the presets name.
"""

from typing import Any

from clearhead.architecture import LearnedPositions, SinusoidalPositions
from clearhead.errors import ClearheadError
from clearhead.families.decoder_row import DecoderRow, Setting, choice, layer_norm
from clearhead.families.gpt_style import TOKEN_CLASSIFIER_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import (
    LAYER,
    QKV_BIASES,
    QKV_WEIGHTS,
    Copy,
    FusedPerGroup,
    NameTable,
    with_biases,
)

# --- OPT and XGLM


def _prepare_opt(settings: Settings) -> Settings:
    """Raise ClearheadError if the embeddings have a width of their own, as in the 350M model."""
    settings.allow_only("word_embed_proj_dim", settings.data.get("hidden_size"))
    return settings


def _decoder_names(prefix: str) -> NameTable:
    """Return the names of fairseq's decoders."""
    layer = prefix + ".layers.{layer}"
    modules = {
        f"{layer}.self_attn.{theirs}": f"{LAYER}.attention.{ours}"
        for theirs, ours in {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}.items()
    }
    modules |= {
        f"{layer}.fc1": f"{LAYER}.feed_forward.up",
        f"{layer}.fc2": f"{LAYER}.feed_forward.down",
        f"{layer}.self_attn_layer_norm": f"{LAYER}.attention_residual.norm",
        f"{layer}.final_layer_norm": f"{LAYER}.feed_forward_residual.norm",
    }
    tables = {f"{prefix}.embed_tokens.weight": "decoder.embedding.tokens.weight", "lm_head.weight": "head.weight"}
    return {**tables, **with_biases(modules)}


OPT = DecoderRow(
    model_type="opt",
    architecture="OPTForCausalLM",
    epsilon=1e-5,
    norm=layer_norm,
    has_norm_weights=Setting("layer_norm_elementwise_affine", True),
    placement=choice("do_layer_norm_before", True, {True: "pre", False: "post"}),
    has_final_norm=Setting("_remove_final_layer_norm", False, lambda removed: not removed, lambda kept: not kept),
    positions=lambda context: LearnedPositions(num_positions=context, offset=2),
    rotary=None,
    num_kv_heads=None,
    head_width=None,
    input_bias=Setting("enable_bias", True),
    output_bias=Setting("enable_bias", True),
    feed_forward=Setting("ffn_dim"),
    feed_forward_bias=Setting("enable_bias", True),
    activation=Setting("activation_function", "relu"),
    gated=False,
    tied=Setting("tie_word_embeddings", True),
    prepare=_prepare_opt,
    token_table="model.decoder.embed_tokens.weight",
    tensor_names={
        **_decoder_names("model.decoder"),
        "model.decoder.embed_positions.weight": "decoder.embedding.positions.weight",
        **with_biases({"model.decoder.final_layer_norm": "decoder.final_norm"}),
    },
    presets={
        "opt-125m": {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "ffn_dim": 3072,
            "vocab_size": 50272,
        }
    },
)
XGLM = DecoderRow(
    model_type="xglm",
    architecture="XGLMForCausalLM",
    width=Setting("d_model"),
    num_layers=Setting("num_layers"),
    num_heads=Setting("attention_heads"),
    epsilon=1e-5,
    norm=layer_norm,
    scaled_by_width=Setting("scale_embedding", True),
    positions=lambda context: SinusoidalPositions(layout="halves_to_end", offset=2),
    rotary=None,
    num_kv_heads=None,
    head_width=None,
    input_bias=True,
    output_bias=True,
    feed_forward=Setting("ffn_dim"),
    feed_forward_bias=True,
    activation=Setting("activation_function", "gelu"),
    gated=False,
    tied=Setting("tie_word_embeddings", True),
    refused={"add_cross_attention": (False,)},
    ignored_tensors=(r"model\.embed_positions\.weights",),  # computed
    tensor_names={**_decoder_names("model"), **with_biases({"model.layer_norm": "decoder.final_norm"})},
    presets={
        "xglm-564m": {"d_model": 1024, "num_layers": 24, "attention_heads": 16, "ffn_dim": 4096, "vocab_size": 256008}
    },
)


# --- Falcon


def _prepare_falcon(settings: Settings) -> Settings:
    """Return the settings with the number of key-value heads and the norm placement that older flags stand for."""
    data = {**settings.data}
    data["hidden_size"] = data.pop("n_embed", None) or data.get("hidden_size")
    is_new, is_parallel = settings.boolean("new_decoder_architecture", False), settings.boolean("parallel_attn", True)
    num_norms = settings.integer("num_ln_in_parallel_attn", 2 if is_new else 1, at_least=1)
    if (is_new and not is_parallel) or num_norms > 2 or (num_norms == 2 and not is_new):
        raise ClearheadError(
            f"{settings.where}: new_decoder_architecture {is_new}, parallel_attn {is_parallel} and "
            f"num_ln_in_parallel_attn {num_norms} do not fit together; transformers cannot run this model either"
        )
    if not is_new:
        one = settings.boolean("multi_query", True)
        data["num_kv_heads"] = 1 if one else data.get("num_kv_heads") or data.get("num_attention_heads")
    data["placement"] = "parallel_norms" if num_norms == 2 else "parallel" if is_parallel else "pre"
    return Settings(data, settings.where)


def _finish_falcon(data: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with the flags for the norm placement and the number of key-value heads."""
    placement, num_kv_heads, num_heads = data.pop("placement"), data["num_kv_heads"], data["num_attention_heads"]
    is_new = placement == "parallel_norms" or num_kv_heads not in (1, num_heads)
    flags = {"new_decoder_architecture": is_new, "parallel_attn": placement != "pre"}
    if is_new:
        flags["num_ln_in_parallel_attn"] = 2 if placement == "parallel_norms" else 1
    return data | flags | {"multi_query": num_kv_heads == 1}


_FALCON = "transformer.h.{layer}"
_ONE_NORM, _TWO_NORMS = ("pre", "parallel"), ("parallel_norms",)
_FALCON_NORMS: NameTable = {
    f"{_FALCON}.{theirs}.{part}": Copy((f"{LAYER}.{ours}.{part}",), only_placements=placements)
    for theirs, ours, placements in (
        ("input_layernorm", "attention_residual.norm", _ONE_NORM),
        ("ln_attn", "attention_residual.norm", _TWO_NORMS),
        ("post_attention_layernorm", "feed_forward_residual.norm", ("pre",)),
        ("ln_mlp", "feed_forward_residual.norm", _TWO_NORMS),
    )
    for part in ("weight", "bias")
}
FALCON = DecoderRow(
    model_type="falcon",
    architecture="FalconForCausalLM",
    epsilon=Setting("layer_norm_epsilon", 1e-5),
    norm=layer_norm,
    placement=Setting("placement", "parallel"),
    num_kv_heads=Setting("num_kv_heads", None),
    head_width=None,
    input_bias=Setting("bias", False),
    output_bias=Setting("bias", False),
    feed_forward=Setting("ffn_hidden_size", None),
    feed_forward_bias=Setting("bias", False),
    activation=Setting("activation", "gelu"),
    gated=False,
    tied=Setting("tie_word_embeddings", True),
    refused={"alibi": (False,)},  # transformers rounds the slopes of these models to bfloat16
    prepare=_prepare_falcon,
    finish=_finish_falcon,
    base_model_prefix="transformer.",
    token_table="transformer.word_embeddings.weight",
    tensor_names={
        "transformer.word_embeddings.weight": "decoder.embedding.tokens.weight",
        f"{_FALCON}.self_attention.query_key_value.weight": FusedPerGroup(QKV_WEIGHTS),
        f"{_FALCON}.self_attention.query_key_value.bias": FusedPerGroup(QKV_BIASES),
        **with_biases(
            {
                f"{_FALCON}.self_attention.dense": f"{LAYER}.attention.output",
                f"{_FALCON}.mlp.dense_h_to_4h": f"{LAYER}.feed_forward.up",
                f"{_FALCON}.mlp.dense_4h_to_h": f"{LAYER}.feed_forward.down",
                "transformer.ln_f": "decoder.final_norm",
            }
        ),
        **_FALCON_NORMS,
        "lm_head.weight": "head.weight",
        **TOKEN_CLASSIFIER_NAMES,
    },
    presets={
        "falcon-7b": {
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "vocab_size": 65024,
        },
        "falcon-40b": {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
            "vocab_size": 65024,
        },
    },
)

ROWS = (OPT, XGLM, FALCON)
