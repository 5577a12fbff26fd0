"""Llama 4, language part: chunked attention with rotary positions; every fourth layer has full attention without them.

The router's sigmoid multiplies the input of each expert; a shared expert is added. Layers with positions normalize
their heads after the rotation (Scout); layers without positions scale queries by a factor that grows with the index.
Sources: the config.json of the releases and Meta's model cards (2025); Scout's rope and context are those of the
Instruct release.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    AttentionPattern,
    Causal,
    Chunked,
    Experts,
    FeedForward,
    GroupedAttention,
    Head,
    Llama3Scaling,
    ModelConfig,
    QueryTemperature,
    RmsNorm,
    Rope,
    RotatedHeadNorm,
    Router,
    Stack,
)
from clearhead.errors import ClearheadError
from clearhead.families.family import (
    Family,
    Preset,
    grouped_attentions,
    look_up_layer_type,
    require_round_trip,
    require_type,
)
from clearhead.families.llama_style import (
    DUPLICATES,
    IGNORED_TENSORS,
    PRE_NORM_NAMES,
    activation_name,
    decoder_only_config,
    first_experts,
    first_feed_forward,
    gated_feed_forward,
    write_attention,
    write_sizes,
)
from clearhead.families.rope import read_rope, write_rope
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, Copy, Fused, NameTable

_CHUNKED, FULL = "chunked_attention", "full_attention"


def mixture(expert: FeedForward, num_experts: int, num_chosen: int = 1) -> Experts:
    """Return a mixture of experts whose shared expert is as wide as the others."""
    return Experts(
        num_experts=num_experts,
        num_chosen=num_chosen,
        expert=expert,
        router=Router(score="sigmoid", weighs="input"),
        shared=expert,
    )


def _llama4_preset(
    num_experts: int, context: int, *, moe_every: int, head_norm: bool, scaling: Llama3Scaling | None = None
) -> Preset:
    """Return a preset in which every `moe_every`-th layer is a mixture of experts."""
    epsilon, num_layers = 1e-5, 48
    heads = GroupedAttention(num_heads=40, num_kv_heads=8, head_width=128)
    with_position = replace(
        heads,
        position=Rope(theta=500000.0, pairing="interleaved", scaling=scaling),
        pattern=Chunked(size=8192),
        head_norm=RotatedHeadNorm(epsilon=epsilon) if head_norm else None,
    )
    without_position = replace(heads, temperature=QueryTemperature(floor=8192, scale=0.1))
    dense, sparse = gated_feed_forward(16384), mixture(gated_feed_forward(8192), num_experts)
    return lambda: decoder_only_config(
        width=5120,
        context=context,
        vocab_size=202048,
        attentions=[with_position if (index + 1) % 4 else without_position for index in range(num_layers)],
        feed_forwards=[dense if (index + 1) % moe_every else sparse for index in range(num_layers)],
        norm=RmsNorm(epsilon=epsilon),
        head=Head(tied=False),
    )


_SCOUT_SCALING = Llama3Scaling(factor=16.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_context=8192)
PRESETS = {
    "llama-4-scout": _llama4_preset(16, 10485760, moe_every=1, head_norm=True, scaling=_SCOUT_SCALING),
    "llama-4-maverick": _llama4_preset(128, 1048576, moe_every=2, head_norm=False),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    num_layers = settings.integer("num_hidden_layers", 48)
    epsilon = settings.number("rms_norm_eps", 1e-5)
    context = settings.integer("max_position_embeddings", 131072)
    return decoder_only_config(
        width=settings.integer("hidden_size", 5120),
        context=context,
        vocab_size=settings.integer("vocab_size", 202048),
        attentions=read_attentions(settings, num_layers, context, epsilon),
        feed_forwards=read_feed_forwards(settings, num_layers),
        norm=RmsNorm(epsilon=epsilon),
        head=Head(tied=settings.boolean("tie_word_embeddings", False)),
    )


def read_attentions(settings: Settings, num_layers: int, context: int, epsilon: float) -> list[GroupedAttention]:
    """Return the attention of each layer: with rotary positions, or without positions and with a query temperature."""
    bias = settings.boolean("attention_bias", False)
    heads = GroupedAttention(
        num_heads=settings.integer("num_attention_heads", 40),
        num_kv_heads=settings.integer("num_key_value_heads", 8, at_least=1),
        head_width=settings.integer("head_dim", 128),
        input_bias=bias,
        output_bias=bias,
    )
    temperature = QueryTemperature(
        floor=settings.integer("floor_scale", 8192), scale=settings.number("attn_scale", 0.1)
    )
    has_temperature = bool(settings.data.get("attn_temperature_tuning", True))  # Scout's first release has 4
    has_head_norm = settings.boolean("use_qk_norm", True)
    with_position = replace(
        heads,
        position=read_rope(settings, context, 500000.0, pairing="interleaved"),
        head_norm=RotatedHeadNorm(epsilon=epsilon) if has_head_norm else None,
    )
    without_position = replace(heads, temperature=temperature if has_temperature else None)
    rotated = read_rotated(settings, num_layers)
    layer_types = settings.per_layer("layer_types", num_layers) or [
        _CHUNKED if rotates else FULL for rotates in rotated
    ]
    patterns: dict[str, AttentionPattern] = {
        FULL: Causal(),
        _CHUNKED: Chunked(size=settings.integer("attention_chunk_size", 8192)),
    }
    return [
        replace(with_position if rotates else without_position, pattern=look_up_layer_type(patterns, name, settings))
        for rotates, name in zip(rotated, layer_types, strict=True)
    ]


def read_rotated(settings: Settings, num_layers: int) -> list[bool]:
    """Return for each layer whether it has rotary positions.

    In `no_rope_layers`, 1 means that it has; the list may be longer than the number of layers.
    """
    every = settings.integer("no_rope_layer_interval", 4, at_least=1)
    flags = settings.array("no_rope_layers") or [(index + 1) % every for index in range(num_layers)]
    if len(flags) < num_layers:
        raise ClearheadError(f"{settings.where}: 'no_rope_layers' has {len(flags)} entries for {num_layers} layers")
    return [bool(flag) for flag in flags[:num_layers]]


def read_feed_forwards(settings: Settings, num_layers: int) -> list[FeedForward | Experts]:
    """Return the feed-forward of each layer: dense or a mixture of experts."""
    activation = settings.activation("hidden_act", "silu")
    step = settings.integer("interleave_moe_layer_step", 1, at_least=1)
    is_listed = "moe_layers" in settings
    sparse_layers = settings.array("moe_layers") if is_listed else range(step - 1, num_layers, step)
    dense = gated_feed_forward(settings.integer("intermediate_size_mlp", 16384), activation)
    sparse = mixture(
        gated_feed_forward(settings.integer("intermediate_size", 8192), activation),
        settings.integer("num_local_experts", 16),
        settings.integer("num_experts_per_tok", 1),
    )
    return [sparse if index in sparse_layers else dense for index in range(num_layers)]


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    stack = require_type(Stack, config.decoder)
    attentions, experts, dense = grouped_attentions(stack), first_experts(stack), first_feed_forward(stack)
    data = write_sizes(config) | write_attention(attentions[0]) | _write_attentions(attentions)
    data |= {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": activation_name(stack),
        "moe_layers": [index for index, layer in enumerate(stack.layers) if isinstance(layer.feed_forward, Experts)],
    }
    if dense:
        data["intermediate_size_mlp"] = dense.width
    if experts:
        data |= {
            "intermediate_size": experts.expert.width,
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_chosen,
        }
    return require_round_trip(data, config, read_config)


def _write_attentions(attentions: Sequence[GroupedAttention]) -> dict[str, Any]:
    """Return the settings of all attention layers; what no layer uses keeps transformers' default."""
    rotated = [isinstance(attention.position, Rope) for attention in attentions]
    patterns = [attention.pattern for attention in attentions]
    chunk_sizes = [pattern.size for pattern in patterns if isinstance(pattern, Chunked)]
    temperatures = [
        attention.temperature for attention in attentions if isinstance(attention.temperature, QueryTemperature)
    ]
    data: dict[str, Any] = {
        "no_rope_layers": [int(rotates) for rotates in rotated],
        "layer_types": [_CHUNKED if isinstance(pattern, Chunked) else FULL for pattern in patterns],
        "use_qk_norm": any(attention.head_norm for attention in attentions),
        "attn_temperature_tuning": bool(temperatures),
    }
    if any(rotated):
        data["rope_parameters"] = write_rope(require_type(Rope, attentions[rotated.index(True)].position))
    if chunk_sizes:
        data["attention_chunk_size"] = chunk_sizes[0]
    if temperatures:
        data |= {"floor_scale": temperatures[0].floor, "attn_scale": temperatures[0].scale}
    return data


# --- tensor names

EXPERTS = "model.layers.{layer}.feed_forward"
NAMES: NameTable = {
    **{name.replace(".mlp.", ".feed_forward."): rule for name, rule in PRE_NORM_NAMES.items()},
    f"{EXPERTS}.router.weight": f"{LAYER}.feed_forward.router.weight",
    # stored (E, in, out), gate and up concatenated
    f"{EXPERTS}.experts.gate_up_proj": Fused(
        (f"{LAYER}.feed_forward.gate", f"{LAYER}.feed_forward.up"), transposed=True
    ),
    f"{EXPERTS}.experts.down_proj": Copy((f"{LAYER}.feed_forward.down",), transposed=True),
    f"{EXPERTS}.shared_expert.gate_proj.weight": f"{LAYER}.feed_forward.shared.gate.weight",
    f"{EXPERTS}.shared_expert.up_proj.weight": f"{LAYER}.feed_forward.shared.up.weight",
    f"{EXPERTS}.shared_expert.down_proj.weight": f"{LAYER}.feed_forward.shared.down.weight",
}

FAMILY = Family(
    name="llama4",
    presets=PRESETS,
    model_types=("llama4_text",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
)
