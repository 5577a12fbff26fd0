"""Qwen 2 and Qwen 3: LLaMA with biases on query, key and value (2), or with normalized heads and experts (3).

Sources: Qwen2 (2024, §2.2), Qwen3 (2025, Tables 1 and 2), the config.json of each release. The router computes a
softmax over all experts, keeps the best few, and divides their weights by the sum.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    AttentionPattern,
    Causal,
    Experts,
    FeedForward,
    GroupedAttention,
    Head,
    HeadNorm,
    ModelConfig,
    RmsNorm,
    Rope,
    Router,
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
    DUPLICATES,
    EXPERT_NAMES,
    HEAD_NORM_NAMES,
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
from clearhead.families.tensor_rules import NameTable

WINDOWED, FULL = "sliding_attention", "full_attention"


def _qwen3_preset(
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: FeedForward | Experts,
    *,
    num_kv_heads: int = 8,
    tied: bool = False,
) -> Preset:
    norm = RmsNorm(epsilon=1e-6)
    attention = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=128,
        position=Rope(theta=1000000.0),
        head_norm=HeadNorm(norm=norm),
    )
    return lambda: decoder_only_config(
        width=width,
        context=40960,
        vocab_size=151936,
        attentions=(attention,) * num_layers,
        feed_forwards=(feed_forward,) * num_layers,
        norm=norm,
        head=Head(tied=tied),
    )


def mixture(expert: FeedForward, *, num_experts: int = 128, num_chosen: int = 8, renormalized: bool = True) -> Experts:
    """Return a mixture of experts without a shared expert."""
    router = Router(score="softmax", renormalize_epsilon=0.0 if renormalized else None)
    return Experts(num_experts=num_experts, num_chosen=num_chosen, expert=expert, router=router)


PRESETS = {
    "qwen3-0.6b": _qwen3_preset(1024, 28, 16, gated_feed_forward(3072), tied=True),
    "qwen3-1.7b": _qwen3_preset(2048, 28, 16, gated_feed_forward(6144), tied=True),
    "qwen3-4b": _qwen3_preset(2560, 36, 32, gated_feed_forward(9728), tied=True),
    "qwen3-8b": _qwen3_preset(4096, 36, 32, gated_feed_forward(12288)),
    "qwen3-14b": _qwen3_preset(5120, 40, 40, gated_feed_forward(17408)),
    "qwen3-32b": _qwen3_preset(5120, 64, 64, gated_feed_forward(25600)),
    "qwen3-30b-a3b": _qwen3_preset(2048, 48, 32, mixture(gated_feed_forward(768)), num_kv_heads=4),
    "qwen3-235b-a22b": _qwen3_preset(4096, 94, 64, mixture(gated_feed_forward(1536)), num_kv_heads=4),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    model_type = settings.string("model_type")
    width, num_heads = settings.integer("hidden_size"), settings.integer("num_attention_heads", at_least=1)
    num_layers = settings.integer("num_hidden_layers")
    context = settings.integer("max_position_embeddings", 32768)
    norm = RmsNorm(epsilon=settings.number("rms_norm_eps", 1e-6))
    bias = model_type != "qwen2" and settings.boolean("attention_bias", False)
    attention = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=settings.integer("num_key_value_heads", 4 if model_type == "qwen3_moe" else num_heads, at_least=1),
        head_width=settings.integer("head_dim", 128 if model_type == "qwen3" else width // num_heads),
        position=read_rope(settings, context),
        input_bias=bias or model_type == "qwen2",
        output_bias=bias,
        head_norm=None if model_type == "qwen2" else HeadNorm(norm=norm),
    )
    return decoder_only_config(
        width=width,
        context=context,
        vocab_size=settings.integer("vocab_size"),
        attentions=[replace(attention, pattern=pattern) for pattern in read_patterns(settings, model_type, num_layers)],
        feed_forwards=read_feed_forwards(settings, model_type, num_layers),
        norm=norm,
        head=Head(tied=settings.boolean("tie_word_embeddings", False)),
    )


def read_feed_forwards(settings: Settings, model_type: str, num_layers: int) -> list[FeedForward | Experts]:
    """Return the feed-forward of each layer.

    Every `decoder_sparse_step`-th layer is a mixture of experts, except those in `mlp_only_layers`.
    """
    activation = settings.activation("hidden_act", "silu")
    dense = gated_feed_forward(settings.integer("intermediate_size"), activation)
    if model_type != "qwen3_moe":
        return [dense] * num_layers
    sparse = mixture(
        gated_feed_forward(settings.integer("moe_intermediate_size"), activation),
        num_experts=settings.integer("num_experts", settings.integer("num_local_experts", 128)),
        num_chosen=settings.integer("num_experts_per_tok"),
        renormalized=settings.boolean("norm_topk_prob", False),
    )
    step, only_dense = settings.integer("decoder_sparse_step", 1, at_least=1), settings.array("mlp_only_layers")
    return [dense if index in only_dense or (index + 1) % step else sparse for index in range(num_layers)]


def read_patterns(settings: Settings, model_type: str, num_layers: int) -> list[AttentionPattern]:
    """Return the attention pattern of each layer.

    `use_sliding_window` gives a window to the layers from `max_window_layers` on, or to those in `layer_types`; in a
    model with experts, to all.
    """
    windowed, has_experts = settings.boolean("use_sliding_window", False), model_type == "qwen3_moe"
    first = 0 if has_experts else settings.integer("max_window_layers", 28)
    layer_types = [] if has_experts else settings.per_layer("layer_types", num_layers)
    default_types = [WINDOWED if windowed and index >= first else FULL for index in range(num_layers)]
    patterns: dict[str, AttentionPattern] = {FULL: Causal()}
    if windowed:
        patterns[WINDOWED] = SlidingWindow(size=settings.integer("sliding_window"))
    return [look_up_layer_type(patterns, name, settings) for name in layer_types or default_types]


ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    stack = require_type(Stack, config.decoder)
    attentions, experts, dense = grouped_attentions(stack), first_experts(stack), first_feed_forward(stack)
    model_type = "qwen3_moe" if experts else "qwen3" if attentions[0].head_norm else "qwen2"
    data = write_sizes(config) | write_attention(attentions[0])
    data |= {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "rope_parameters": write_rope(require_type(Rope, attentions[0].position)),
        "hidden_act": activation_name(stack),
        # transformers does not use `intermediate_size` if all layers have experts
        "intermediate_size": (dense or require_type(Experts, experts).expert).width,
    }
    if experts:
        data |= {
            "moe_intermediate_size": experts.expert.width,
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_chosen,
            "norm_topk_prob": experts.router.renormalize_epsilon is not None,
            "mlp_only_layers": [
                index for index, layer in enumerate(stack.layers) if isinstance(layer.feed_forward, FeedForward)
            ],
        }
    return require_round_trip(data | _write_windows(attentions), config, read_config)


def _write_windows(attentions: Sequence[GroupedAttention]) -> dict[str, Any]:
    sizes = [
        attention.pattern.size if isinstance(attention.pattern, SlidingWindow) else None for attention in attentions
    ]
    return {
        "use_sliding_window": any(sizes),
        "sliding_window": next((size for size in sizes if size), None),
        "layer_types": [WINDOWED if size else FULL for size in sizes],
    }


NAMES: NameTable = {
    **PRE_NORM_NAMES,
    **EXPERT_NAMES,
    **HEAD_NORM_NAMES,
}

FAMILY = Family(
    name="qwen",
    presets=PRESETS,
    model_types=tuple(ARCHITECTURES),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="model.",
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
)
