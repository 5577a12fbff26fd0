"""Qwen 2 and Qwen 3: LLaMA with biases on query, key and value (2), or with normed heads and mixtures (3).

Sources: Qwen2 (2024, §2.2), Qwen3 (2025, Tables 1 and 2), the config.json of each release. The mixture's router
takes the softmax over all experts, then the best few, then divides by their sum.
"""

from collections.abc import Callable, Sequence
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
from clearhead.families import llama
from clearhead.families.family import Family, chosen, grouped_of, narrow, said_whole
from clearhead.families.names import LAYER, Table
from clearhead.families.rope import read_rope, write_rope
from clearhead.families.settings import Settings
from clearhead.families.trunk import (
    MIXTURE_NAMES,
    activation_name,
    dense_of,
    experts_of,
    gated,
    language_model,
    write_grouped,
    write_sizes,
)


def qwen3(
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: FeedForward | Experts,
    *,
    num_kv_heads: int = 8,
    tied: bool = False,
) -> Callable[[], ModelConfig]:
    norm = RmsNorm(epsilon=1e-6)
    attention = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=128,
        position=Rope(theta=1000000.0),
        head_norm=HeadNorm(norm=norm),
    )
    return lambda: language_model(
        width=width,
        context=40960,
        vocab_size=151936,
        attentions=(attention,) * num_layers,
        feed_forwards=(feed_forward,) * num_layers,
        norm=norm,
        head=Head(tied=tied),
    )


def mixture(expert: FeedForward, *, num_experts: int = 128, num_chosen: int = 8, renormalized: bool = True) -> Experts:
    router = Router(score="softmax", renormalize_epsilon=0.0 if renormalized else None)
    return Experts(num_experts=num_experts, num_chosen=num_chosen, expert=expert, router=router)


PRESETS = {
    "qwen3-0.6b": qwen3(1024, 28, 16, gated(3072), tied=True),
    "qwen3-1.7b": qwen3(2048, 28, 16, gated(6144), tied=True),
    "qwen3-4b": qwen3(2560, 36, 32, gated(9728), tied=True),
    "qwen3-8b": qwen3(4096, 36, 32, gated(12288)),
    "qwen3-14b": qwen3(5120, 40, 40, gated(17408)),
    "qwen3-32b": qwen3(5120, 64, 64, gated(25600)),
    "qwen3-30b-a3b": qwen3(2048, 48, 32, mixture(gated(768)), num_kv_heads=4),
    "qwen3-235b-a22b": qwen3(4096, 94, 64, mixture(gated(1536)), num_kv_heads=4),
}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    kind = settings.text("model_type")
    width, num_heads = settings.whole("hidden_size"), settings.whole("num_attention_heads", at_least=1)
    num_layers = settings.whole("num_hidden_layers")
    context = settings.whole("max_position_embeddings", 32768)
    norm = RmsNorm(epsilon=settings.number("rms_norm_eps", 1e-6))
    bias = kind != "qwen2" and settings.flag("attention_bias", False)
    attention = GroupedAttention(
        num_heads=num_heads,
        num_kv_heads=settings.whole("num_key_value_heads", 4 if kind == "qwen3_moe" else num_heads, at_least=1),
        head_width=settings.whole("head_dim", 128 if kind == "qwen3" else width // num_heads),
        position=read_rope(settings, context),
        input_bias=bias or kind == "qwen2",
        output_bias=bias,
        head_norm=None if kind == "qwen2" else HeadNorm(norm=norm),
    )
    return language_model(
        width=width,
        context=context,
        vocab_size=settings.whole("vocab_size"),
        attentions=[replace(attention, pattern=pattern) for pattern in read_reaches(settings, kind, num_layers)],
        feed_forwards=read_feed_forwards(settings, kind, num_layers),
        norm=norm,
        head=Head(tied=settings.flag("tie_word_embeddings", False)),
    )


def read_feed_forwards(settings: Settings, kind: str, num_layers: int) -> list[FeedForward | Experts]:
    """Every `decoder_sparse_step`-th layer is a mixture, save those in `mlp_only_layers`."""
    activation = settings.activation("hidden_act", "silu")
    dense = gated(settings.whole("intermediate_size"), activation)
    if kind != "qwen3_moe":
        return [dense] * num_layers
    sparse = mixture(
        gated(settings.whole("moe_intermediate_size"), activation),
        num_experts=settings.whole("num_experts", settings.whole("num_local_experts", 128)),
        num_chosen=settings.whole("num_experts_per_tok"),
        renormalized=settings.flag("norm_topk_prob", False),
    )
    step, only_dense = settings.whole("decoder_sparse_step", 1, at_least=1), settings.items("mlp_only_layers")
    return [dense if n in only_dense or (n + 1) % step else sparse for n in range(num_layers)]


def read_reaches(settings: Settings, kind: str, num_layers: int) -> list[AttentionPattern]:
    """With windows on, they are in the layers from `max_window_layers` up, or as listed; in a mixture in all."""
    windowed = settings.flag("use_sliding_window", False)
    first = 0 if kind == "qwen3_moe" else settings.whole("max_window_layers", 28)
    types = [] if kind == "qwen3_moe" else settings.per_layer("layer_types", num_layers)
    types = types or ["sliding_attention" if windowed and n >= first else "full_attention" for n in range(num_layers)]
    reaches: dict[str, AttentionPattern] = {"full_attention": Causal()}
    if windowed:
        reaches["sliding_attention"] = SlidingWindow(size=settings.whole("sliding_window"))
    return [chosen(reaches, name, settings) for name in types]


ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def write(config: ModelConfig) -> dict[str, Any]:
    stack = narrow(Stack, config.decoder)
    attentions, experts, dense = grouped_of(stack), experts_of(stack), dense_of(stack)
    kind = "qwen3_moe" if experts else "qwen3" if attentions[0].head_norm else "qwen2"
    data = write_sizes(config) | write_grouped(attentions[0])
    data |= {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "rope_parameters": write_rope(narrow(Rope, attentions[0].position)),
        "hidden_act": activation_name(stack),
        "intermediate_size": (dense or narrow(Experts, experts).expert).width,  # of a mixture: unused
    }
    if experts:
        data |= {
            "moe_intermediate_size": experts.expert.width,
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_chosen,
            "norm_topk_prob": experts.router.renormalize_epsilon is not None,
            "mlp_only_layers": [n for n, one in enumerate(stack.layers) if isinstance(one.feed_forward, FeedForward)],
        }
    return said_whole(data | write_windows(attentions), config, read)


def write_windows(attentions: Sequence[GroupedAttention]) -> dict[str, Any]:
    sizes = [
        attention.pattern.size if isinstance(attention.pattern, SlidingWindow) else None for attention in attentions
    ]
    return {
        "use_sliding_window": any(sizes),
        "sliding_window": next((size for size in sizes if size), None),
        "layer_types": ["sliding_attention" if size else "full_attention" for size in sizes],
    }


NAMES: Table = {
    **llama.NAMES,
    **MIXTURE_NAMES,
    "model.layers.{layer}.self_attn.q_norm.weight": f"{LAYER}.attention.query_norm.weight",
    "model.layers.{layer}.self_attn.k_norm.weight": f"{LAYER}.attention.key_norm.weight",
}

FAMILY = Family(
    name="qwen",
    presets=PRESETS,
    model_types=tuple(ARCHITECTURES),
    read=read,
    write=write,
    names=NAMES,
    prefix="model.",
    copies=llama.COPIES,
    dropped=llama.DROPPED,
)
