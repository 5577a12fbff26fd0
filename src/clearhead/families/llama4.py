"""Llama 4, the language part: chunked layers with positions, and every fourth layer whole and without them.

Experts take their input times the router's sigmoid, beside a shared expert. Layers with positions norm their heads
after the rotation (Scout); those without let queries grow with the index. Sources: the config.json of the releases
and Meta's model cards (2025); Scout's rope and context are those of the Instruct release.
"""

from collections.abc import Callable, Sequence
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
from clearhead.families import llama
from clearhead.families.family import Family, chosen, grouped_of, narrow, said_whole
from clearhead.families.names import LAYER, Copy, Fused, Table
from clearhead.families.rope import read_rope, write_rope
from clearhead.families.settings import Settings
from clearhead.families.trunk import (
    activation_name,
    dense_of,
    experts_of,
    gated,
    language_model,
    write_grouped,
    write_sizes,
)

CHUNKED, FULL = "chunked_attention", "full_attention"


def mixture(expert: FeedForward, num_experts: int, num_chosen: int = 1) -> Experts:
    """The shared expert is as wide as the others."""
    return Experts(
        num_experts=num_experts,
        num_chosen=num_chosen,
        expert=expert,
        router=Router(score="sigmoid", weighs="input"),
        shared=expert,
    )


def released(
    num_experts: int, context: int, *, every: int, norm: bool, scaling: Llama3Scaling | None = None
) -> Callable[[], ModelConfig]:
    """`every` so many layers one is a mixture; `norm`: of heads."""
    epsilon, num_layers = 1e-5, 48
    heads = GroupedAttention(num_heads=40, num_kv_heads=8, head_width=128)
    placed = replace(
        heads,
        position=Rope(theta=500000.0, pairing="interleaved", scaling=scaling),
        pattern=Chunked(size=8192),
        head_norm=RotatedHeadNorm(epsilon=epsilon) if norm else None,
    )
    unplaced = replace(heads, temperature=QueryTemperature(floor=8192, scale=0.1))
    dense, sparse = gated(16384), mixture(gated(8192), num_experts)
    return lambda: language_model(
        width=5120,
        context=context,
        vocab_size=202048,
        attentions=[placed if (number + 1) % 4 else unplaced for number in range(num_layers)],
        feed_forwards=[dense if (number + 1) % every else sparse for number in range(num_layers)],
        norm=RmsNorm(epsilon=epsilon),
        head=Head(tied=False),
    )


SCOUT_SCALING = Llama3Scaling(factor=16.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_context=8192)
PRESETS = {
    "llama-4-scout": released(16, 10485760, every=1, norm=True, scaling=SCOUT_SCALING),
    "llama-4-maverick": released(128, 1048576, every=2, norm=False),
}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    num_layers = settings.whole("num_hidden_layers", 48)
    epsilon = settings.number("rms_norm_eps", 1e-5)
    context = settings.whole("max_position_embeddings", 131072)
    return language_model(
        width=settings.whole("hidden_size", 5120),
        context=context,
        vocab_size=settings.whole("vocab_size", 202048),
        attentions=read_attentions(settings, num_layers, context, epsilon),
        feed_forwards=read_feed_forwards(settings, num_layers),
        norm=RmsNorm(epsilon=epsilon),
        head=Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def read_attentions(settings: Settings, num_layers: int, context: int, epsilon: float) -> list[GroupedAttention]:
    bias = settings.flag("attention_bias", False)
    heads = GroupedAttention(
        num_heads=settings.whole("num_attention_heads", 40),
        num_kv_heads=settings.whole("num_key_value_heads", 8, at_least=1),
        head_width=settings.whole("head_dim", 128),
        input_bias=bias,
        output_bias=bias,
    )
    temperature = QueryTemperature(floor=settings.whole("floor_scale", 8192), scale=settings.number("attn_scale", 0.1))
    tuned = bool(settings.data.get("attn_temperature_tuning", True))  # Scout's first release says 4
    normed = settings.flag("use_qk_norm", True)
    placed = replace(
        heads,
        position=read_rope(settings, context, 500000.0, pairing="interleaved"),
        head_norm=RotatedHeadNorm(epsilon=epsilon) if normed else None,
    )
    unplaced = replace(heads, temperature=temperature if tuned else None)
    rotated = read_rotated(settings, num_layers)
    types = settings.per_layer("layer_types", num_layers) or [CHUNKED if turns else FULL for turns in rotated]
    reaches: dict[str, AttentionPattern] = {
        FULL: Causal(),
        CHUNKED: Chunked(size=settings.whole("attention_chunk_size", 8192)),
    }
    return [
        replace(placed if turns else unplaced, pattern=chosen(reaches, name, settings))
        for turns, name in zip(rotated, types, strict=True)
    ]


def read_rotated(settings: Settings, num_layers: int) -> list[bool]:
    """In `no_rope_layers` 1 means: has positions. It may name more layers than there are."""
    every = settings.whole("no_rope_layer_interval", 4, at_least=1)
    given = settings.items("no_rope_layers") or [(number + 1) % every for number in range(num_layers)]
    if len(given) < num_layers:
        raise ClearheadError(f"{settings.where}: no_rope_layers has {len(given)} entries for {num_layers} layers")
    return [bool(flag) for flag in given[:num_layers]]


def read_feed_forwards(settings: Settings, num_layers: int) -> list[FeedForward | Experts]:
    activation = settings.activation("hidden_act", "silu")
    step = settings.whole("interleave_moe_layer_step", 1, at_least=1)
    listed = "moe_layers" in settings
    sparse_layers = settings.items("moe_layers") if listed else range(step - 1, num_layers, step)
    dense = gated(settings.whole("intermediate_size_mlp", 16384), activation)
    sparse = mixture(
        gated(settings.whole("intermediate_size", 8192), activation),
        settings.whole("num_local_experts", 16),
        settings.whole("num_experts_per_tok", 1),
    )
    return [sparse if number in sparse_layers else dense for number in range(num_layers)]


def write(config: ModelConfig) -> dict[str, Any]:
    stack = narrow(Stack, config.decoder)
    attentions, experts, dense = grouped_of(stack), experts_of(stack), dense_of(stack)
    data = write_sizes(config) | write_grouped(attentions[0]) | write_attentions(attentions)
    data |= {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "hidden_act": activation_name(stack),
        "moe_layers": [number for number, one in enumerate(stack.layers) if isinstance(one.feed_forward, Experts)],
    }
    if dense:
        data["intermediate_size_mlp"] = dense.width
    if experts:
        data |= {
            "intermediate_size": experts.expert.width,
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_chosen,
        }
    return said_whole(data, config, read)


def write_attentions(attentions: Sequence[GroupedAttention]) -> dict[str, Any]:
    """What no layer has is left to transformers' defaults."""
    rotated = [isinstance(one.position, Rope) for one in attentions]
    chunks = [one.pattern.size for one in attentions if isinstance(one.pattern, Chunked)]
    temperatures = [one.temperature for one in attentions if isinstance(one.temperature, QueryTemperature)]
    data: dict[str, Any] = {
        "no_rope_layers": [int(turns) for turns in rotated],
        "layer_types": [CHUNKED if isinstance(one.pattern, Chunked) else FULL for one in attentions],
        "use_qk_norm": any(one.head_norm for one in attentions),
        "attn_temperature_tuning": bool(temperatures),
    }
    if any(rotated):
        data["rope_parameters"] = write_rope(narrow(Rope, attentions[rotated.index(True)].position))
    if chunks:
        data["attention_chunk_size"] = chunks[0]
    if temperatures:
        data |= {"floor_scale": temperatures[0].floor, "attn_scale": temperatures[0].scale}
    return data


EXPERTS = "model.layers.{layer}.feed_forward"
NAMES: Table = {
    **{name.replace(".mlp.", ".feed_forward."): row for name, row in llama.NAMES.items()},
    f"{EXPERTS}.router.weight": f"{LAYER}.feed_forward.router.weight",
    # (E, in, out), gate and up side by side
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
    read=read,
    write=write,
    names=NAMES,
    prefix="model.",
    copies=llama.COPIES,
    dropped=llama.DROPPED,
)
