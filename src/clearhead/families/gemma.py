"""Gemma 3, the language part: five layers with a short window for each one that sees everything.

Norms on both sides of each branch with weights stored as their distance from 1, normed heads, GeGLU, embeddings
times √width. Windowed layers turn by a base of their own. Sources: Gemma 3 (2025, Table 1), the config.json of each
release. `attn_logit_softcapping` is Gemma 2's; transformers' Gemma 3 does not apply it, nor do we.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Causal,
    FeedForward,
    GroupedAttention,
    Head,
    HeadNorm,
    LinearScaling,
    ModelConfig,
    RmsNorm,
    Rope,
    SlidingWindow,
    Stack,
)
from clearhead.families import llama
from clearhead.families.family import Family, chosen, grouped_of, narrow, said_whole
from clearhead.families.names import LAYER, Table
from clearhead.families.rope import read_scaling, write_rope
from clearhead.families.settings import Settings
from clearhead.families.trunk import (
    TRUNK,
    activation_name,
    check_heads,
    dense_of,
    gated,
    language_model,
    write_grouped,
    write_sizes,
)

WINDOWED, FULL = "sliding_attention", "full_attention"
LOCAL_THETA, GLOBAL_THETA = 10000.0, 1000000.0


def weight_from_one(epsilon: float) -> RmsNorm:
    return RmsNorm(epsilon=epsilon, unit_offset=True, scale_in_float32=True)


def gemma3(
    width: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    feed_forward: int,
    *,
    head_width: int = 256,
    scale_width: int = 256,
    sees_images: bool = True,
) -> Callable[[], ModelConfig]:
    """`scale_width` divides the scores by its root. The sizes that see images were also made for long texts."""
    norm = weight_from_one(1e-6)
    scaling = LinearScaling(factor=8.0) if sees_images else None
    full = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        position=Rope(theta=GLOBAL_THETA, scaling=scaling),
        scale=scale_width**-0.5,
        head_norm=HeadNorm(norm=norm),
    )
    windowed = replace(full, position=Rope(theta=LOCAL_THETA), pattern=SlidingWindow(size=1024 if sees_images else 512))
    return lambda: language_model(
        width=width,
        context=131072 if sees_images else 32768,
        vocab_size=262208 if sees_images else 262144,
        attentions=[windowed if (number + 1) % 6 else full for number in range(num_layers)],
        feed_forwards=[gated(feed_forward, "gelu_tanh")] * num_layers,
        norm=norm,
        head=Head(tied=True),
        placement="sandwich",
        embedding_scale=width**0.5,
    )


PRESETS = {
    "gemma-3-270m": gemma3(640, 18, 4, 1, 2048, sees_images=False),
    "gemma-3-1b": gemma3(1152, 26, 4, 1, 6912, sees_images=False),
    "gemma-3-4b": gemma3(2560, 34, 8, 4, 10240),
    "gemma-3-12b": gemma3(3840, 48, 16, 8, 15360),
    "gemma-3-27b": gemma3(5376, 62, 32, 16, 21504, head_width=128, scale_width=168),
}


# --- transformers' words; the released files of 4B and above leave most of them to these defaults


def read(settings: Settings) -> ModelConfig:
    settings.refuse("use_bidirectional_attention", False)
    width, num_layers = settings.whole("hidden_size", 2304), settings.whole("num_hidden_layers", 26)
    activation = settings.activation("hidden_activation", "gelu_pytorch_tanh")
    norm = weight_from_one(settings.number("rms_norm_eps", 1e-6))
    softcap = settings.number("final_logit_softcapping") if "final_logit_softcapping" in settings else None
    context = settings.whole("max_position_embeddings", 131072)
    return language_model(
        width=width,
        context=context,
        vocab_size=settings.whole("vocab_size", 262208),
        attentions=read_attentions(settings, num_layers, context, norm),
        feed_forwards=[gated(settings.whole("intermediate_size", 9216), activation)] * num_layers,
        norm=norm,
        head=Head(tied=settings.flag("tie_word_embeddings", True), softcap=softcap),
        placement="sandwich",
        embedding_scale=width**0.5,
    )


def read_attentions(settings: Settings, num_layers: int, context: int, norm: RmsNorm) -> list[GroupedAttention]:
    bias = settings.flag("attention_bias", False)
    full = GroupedAttention(
        num_heads=settings.whole("num_attention_heads", 8),
        num_kv_heads=settings.whole("num_key_value_heads", 4, at_least=1),
        head_width=settings.whole("head_dim", 256),
        position=read_rope(settings, FULL, context),
        input_bias=bias,
        output_bias=bias,
        scale=settings.whole("query_pre_attn_scalar", 256, at_least=1) ** -0.5,
        head_norm=HeadNorm(norm=norm),
    )
    kinds = {FULL: full}
    types = read_layer_types(settings, num_layers)
    if WINDOWED in types:
        window = SlidingWindow(size=settings.whole("sliding_window", 4096))
        kinds[WINDOWED] = replace(full, position=read_rope(settings, WINDOWED, context), pattern=window)
    return [chosen(kinds, name, settings) for name in types]


def read_layer_types(settings: Settings, num_layers: int) -> list[Any]:
    every = settings.whole("sliding_window_pattern", 6, at_least=1)
    by_pattern = [WINDOWED if (number + 1) % every else FULL for number in range(num_layers)]
    return settings.per_layer("layer_types", num_layers) or by_pattern


def read_rope(settings: Settings, layer_type: str, context: int) -> Rope:
    """`rope_parameters` by type of layer; before it, `rope_scaling` for full layers and a base for each type."""
    parameters = settings.table("rope_parameters").table(layer_type)
    if layer_type == FULL:
        scaling = settings.table("rope_scaling")
        parameters = Settings({**parameters.data, **scaling.data}, scaling.where)
        theta = settings.number("rope_theta", GLOBAL_THETA)
    else:
        theta = settings.number("rope_local_base_freq", LOCAL_THETA)
    return Rope(theta=parameters.number("rope_theta", theta), scaling=read_scaling(parameters, context))


def write(config: ModelConfig) -> dict[str, Any]:
    stack, head = narrow(Stack, config.decoder), narrow(Head, config.head)
    attentions = grouped_of(stack)
    windowed = next((one for one in attentions if isinstance(one.pattern, SlidingWindow)), None)
    full = next((one for one in attentions if isinstance(one.pattern, Causal)), None)
    ropes = {WINDOWED: windowed, FULL: full}
    check_heads(config, attentions[0].num_heads)
    data = write_sizes(config) | write_grouped(attentions[0])
    data |= {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": narrow(FeedForward, dense_of(stack)).width,
        "hidden_activation": activation_name(stack),
        "query_pre_attn_scalar": round(narrow(float, attentions[0].scale) ** -2),
        "layer_types": [WINDOWED if isinstance(one.pattern, SlidingWindow) else FULL for one in attentions],
        "rope_parameters": {name: write_rope(narrow(Rope, one.position)) for name, one in ropes.items() if one},
        "final_logit_softcapping": head.softcap,
    }
    if windowed:
        data["sliding_window"] = narrow(SlidingWindow, windowed.pattern).size
    return said_whole(data, config, read)


NAMES: Table = {
    **TRUNK,
    "model.layers.{layer}.self_attn.q_norm.weight": f"{LAYER}.attention.query_norm.weight",
    "model.layers.{layer}.self_attn.k_norm.weight": f"{LAYER}.attention.key_norm.weight",
    "model.layers.{layer}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": f"{LAYER}.attention_residual.branch_norm.weight",
    "model.layers.{layer}.pre_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "model.layers.{layer}.post_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.branch_norm.weight",
}

FAMILY = Family(
    name="gemma",
    presets=PRESETS,
    model_types=("gemma3_text",),
    read=read,
    write=write,
    names=NAMES,
    prefix="model.",
    copies=llama.COPIES,
    dropped=llama.DROPPED,
)
