"""Gemma 3, language part: five layers with sliding-window attention for each layer with full attention.

Norms before and after each branch, whose weights are stored minus 1; normalized queries and keys; GeGLU; embeddings
multiplied by √width. Windowed layers have their own rotary base. Sources: Gemma 3 (2025, Table 1), the config.json of
each release. `attn_logit_softcapping` belongs to Gemma 2; transformers' Gemma 3 ignores it, and so do we.
"""

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
from clearhead.families.family import (
    Family,
    Preset,
    grouped_attentions,
    look_up_layer_type,
    require_round_trip,
    require_type,
)
from clearhead.families.llama_style import (
    COMMON_NAMES,
    DUPLICATES,
    HEAD_NORM_NAMES,
    IGNORED_TENSORS,
    activation_name,
    decoder_only_config,
    first_feed_forward,
    gated_feed_forward,
    require_divisible_width,
    write_attention,
    write_sizes,
)
from clearhead.families.rope import read_scaling, rope_parameters_of_type, write_rope
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, NameTable

WINDOWED, FULL = "sliding_attention", "full_attention"
_LOCAL_THETA, _GLOBAL_THETA = 10000.0, 1000000.0


def _unit_offset_norm(epsilon: float) -> RmsNorm:
    """Return an RMS norm that multiplies by 1 + weight, in float32."""
    return RmsNorm(epsilon=epsilon, unit_offset=True, scale_in_float32=True)


def gemma3_preset(
    width: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    feed_forward: int,
    *,
    head_width: int = 256,
    scale_width: int = 256,
    multimodal: bool = True,
) -> Preset:
    """Return a preset; scores are divided by √scale_width. The multimodal sizes also have the longer context."""
    norm = _unit_offset_norm(1e-6)
    scaling = LinearScaling(factor=8.0) if multimodal else None
    full = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        position=Rope(theta=_GLOBAL_THETA, scaling=scaling),
        scale=scale_width**-0.5,
        head_norm=HeadNorm(norm=norm),
    )
    windowed = replace(full, position=Rope(theta=_LOCAL_THETA), pattern=SlidingWindow(size=1024 if multimodal else 512))
    return lambda: decoder_only_config(
        width=width,
        context=131072 if multimodal else 32768,
        vocab_size=262208 if multimodal else 262144,
        attentions=[windowed if (index + 1) % 6 else full for index in range(num_layers)],
        feed_forwards=[gated_feed_forward(feed_forward, "gelu_tanh")] * num_layers,
        norm=norm,
        head=Head(tied=True),
        placement="sandwich",
        embedding_scale=width**0.5,
    )


PRESETS = {
    "gemma-3-270m": gemma3_preset(640, 18, 4, 1, 2048, multimodal=False),
    "gemma-3-1b": gemma3_preset(1152, 26, 4, 1, 6912, multimodal=False),
    "gemma-3-4b": gemma3_preset(2560, 34, 8, 4, 10240),
    "gemma-3-12b": gemma3_preset(3840, 48, 16, 8, 15360),
    "gemma-3-27b": gemma3_preset(5376, 62, 32, 16, 21504, head_width=128, scale_width=168),
}


# --- config.json; the released files of 4B and above rely on these defaults for most settings


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    settings.allow_only("use_bidirectional_attention", False)
    if settings.boolean("is_text_part", False):  # transformers' class of the whole model ignores it
        settings.allow_only("final_logit_softcapping")
    width, num_layers = settings.integer("hidden_size", 2304), settings.integer("num_hidden_layers", 26)
    activation = settings.activation("hidden_activation", "gelu_pytorch_tanh")
    norm = _unit_offset_norm(settings.number("rms_norm_eps", 1e-6))
    softcap = settings.number("final_logit_softcapping") if "final_logit_softcapping" in settings else None
    context = settings.integer("max_position_embeddings", 131072)
    return decoder_only_config(
        width=width,
        context=context,
        vocab_size=settings.integer("vocab_size", 262208),
        attentions=read_attentions(settings, num_layers, context, norm),
        feed_forwards=[gated_feed_forward(settings.integer("intermediate_size", 9216), activation)] * num_layers,
        norm=norm,
        head=Head(tied=settings.boolean("tie_word_embeddings", True), softcap=softcap),
        placement="sandwich",
        embedding_scale=width**0.5,
    )


def read_attentions(settings: Settings, num_layers: int, context: int, norm: RmsNorm) -> list[GroupedAttention]:
    """Return the attention of each layer: full, or in a sliding window."""
    bias = settings.boolean("attention_bias", False)
    full = GroupedAttention(
        num_heads=settings.integer("num_attention_heads", 8),
        num_kv_heads=settings.integer("num_key_value_heads", 4, at_least=1),
        head_width=settings.integer("head_dim", 256),
        position=read_rope(settings, FULL, context),
        input_bias=bias,
        output_bias=bias,
        scale=settings.integer("query_pre_attn_scalar", 256, at_least=1) ** -0.5,
        head_norm=HeadNorm(norm=norm),
    )
    attentions = {FULL: full}
    layer_types = _read_layer_types(settings, num_layers)
    if WINDOWED in layer_types:
        window = SlidingWindow(size=settings.integer("sliding_window", 4096))
        attentions[WINDOWED] = replace(full, position=read_rope(settings, WINDOWED, context), pattern=window)
    return [look_up_layer_type(attentions, name, settings) for name in layer_types]


def _read_layer_types(settings: Settings, num_layers: int) -> list[Any]:
    every = settings.integer("sliding_window_pattern", 6, at_least=1)
    by_pattern = [WINDOWED if (index + 1) % every else FULL for index in range(num_layers)]
    return settings.per_layer("layer_types", num_layers) or by_pattern


def read_rope(settings: Settings, layer_type: str, context: int) -> Rope:
    """Return the rotary positions of one layer type.

    `rope_parameters` has an entry for each type; older files have `rope_scaling` for full layers and a base per type.
    """
    is_full = layer_type == FULL
    parameters = rope_parameters_of_type(settings, layer_type, merge_scaling=is_full)
    old_name, theta = ("rope_theta", _GLOBAL_THETA) if is_full else ("rope_local_base_freq", _LOCAL_THETA)
    theta = settings.number(old_name, theta)
    return Rope(theta=parameters.number("rope_theta", theta), scaling=read_scaling(parameters, context))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    stack, head = require_type(Stack, config.decoder), require_type(Head, config.head)
    attentions = grouped_attentions(stack)
    by_pattern = {type(attention.pattern): attention for attention in reversed(attentions)}  # the first of each type
    by_type = {WINDOWED: by_pattern.get(SlidingWindow), FULL: by_pattern.get(Causal)}
    require_divisible_width(config, attentions[0].num_heads)
    data = write_sizes(config) | write_attention(attentions[0])
    data |= {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": require_type(FeedForward, first_feed_forward(stack)).width,
        "hidden_activation": activation_name(stack),
        "query_pre_attn_scalar": round(require_type(float, attentions[0].scale) ** -2),
        "layer_types": [WINDOWED if isinstance(attention.pattern, SlidingWindow) else FULL for attention in attentions],
        "rope_parameters": {
            name: write_rope(require_type(Rope, attention.position)) for name, attention in by_type.items() if attention
        },
        "final_logit_softcapping": head.softcap,
    }
    windows = [attention.pattern for attention in attentions if isinstance(attention.pattern, SlidingWindow)]
    if windows:
        data["sliding_window"] = windows[0].size
    return require_round_trip(data, config, read_config)


NAMES: NameTable = {
    **COMMON_NAMES,
    **HEAD_NORM_NAMES,
    "model.layers.{layer}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
    "model.layers.{layer}.post_attention_layernorm.weight": f"{LAYER}.attention_residual.branch_norm.weight",
    "model.layers.{layer}.pre_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "model.layers.{layer}.post_feedforward_layernorm.weight": f"{LAYER}.feed_forward_residual.branch_norm.weight",
}

FAMILY = Family(
    name="gemma",
    presets=PRESETS,
    model_types=("gemma3_text",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
)
