"""GPT-1, GPT-2 and GPT-3: learned positions, biases everywhere, the tanh form of GELU, the token table as head.

Norms stand after each branch in GPT-1, before it from GPT-2 on. GPT-3 is GPT-2 with every other layer banded.
Sources: Radford et al. 2018 (§4.1), 2019 (Table 2) and the released config.json; Brown et al. 2020 (Table 2.1).
"""

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, Literal

from clearhead.architecture import (
    Activation,
    Causal,
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    SlidingWindow,
    Stack,
)
from clearhead.errors import unknown_name
from clearhead.families.family import Family, said_whole
from clearhead.families.names import LAYER, QKV_BIASES, QKV_WEIGHTS, Copy, Fused, Table
from clearhead.families.plain import multi_head, plain_layers, plain_parts
from clearhead.families.settings import ACTIVATION_NAMES_BACK, Settings


def gpt(
    *,
    width: int,
    attentions: Iterable[GroupedAttention],
    vocab_size: int,
    context: int,
    feed_forward: int | None = None,
    activation: Activation = "gelu_tanh",
    epsilon: float = 1e-5,
    placement: Literal["pre", "post"] = "pre",
    tied: bool = True,
) -> ModelConfig:
    """`feed_forward` None: four times the width."""
    norm = LayerNorm(epsilon=epsilon)
    inner_width = 4 * width if feed_forward is None else feed_forward
    stack = Stack(
        embedding=Embedding(vocab_size=vocab_size, positions=LearnedPositions(num_positions=context)),
        layers=plain_layers(
            attentions, FeedForward(width=inner_width, activation=activation, bias=True), norm, placement
        ),
        final_norm=norm if placement == "pre" else None,
    )
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=tied))


def gpt1() -> ModelConfig:
    return gpt(width=768, attentions=[multi_head(768, 12)] * 12, vocab_size=40478, context=512, placement="post")


def gpt2(width: int, num_layers: int, num_heads: int) -> Callable[[], ModelConfig]:
    return lambda: gpt(
        width=width, attentions=[multi_head(width, num_heads)] * num_layers, vocab_size=50257, context=1024
    )


def gpt3(width: int, num_layers: int, num_heads: int, band: int = 256) -> Callable[[], ModelConfig]:
    """Dense and banded layers in turn. Neither the width of the band nor which comes first is published.

    256, and dense first, are the choices of GPT-Neo, the open model made after the paper.
    """
    reaches = [SlidingWindow(size=band) if number % 2 else Causal() for number in range(num_layers)]
    return lambda: gpt(
        width=width,
        attentions=[multi_head(width, num_heads, pattern=pattern) for pattern in reaches],
        vocab_size=50257,
        context=2048,
    )


GPT1_PRESETS = {"gpt1": gpt1}
GPT2_PRESETS = {
    "gpt2": gpt2(768, 12, 12),
    "gpt2-medium": gpt2(1024, 24, 16),
    "gpt2-large": gpt2(1280, 36, 20),
    "gpt2-xl": gpt2(1600, 48, 25),
}
# Two rows of Table 2.1 contradict themselves, since heads times head width must be the width: 1.3B prints 24 heads
# of 128 for a width of 2048, and only 16 give 1.3B parameters; 13B prints a width of 5140 for 40 heads of 128.
GPT3_PRESETS = {
    "gpt3-125m": gpt3(768, 12, 12),
    "gpt3-350m": gpt3(1024, 24, 16),
    "gpt3-760m": gpt3(1536, 24, 16),
    "gpt3-1.3b": gpt3(2048, 24, 16),
    "gpt3-2.7b": gpt3(2560, 32, 32),
    "gpt3-6.7b": gpt3(4096, 32, 32),
    "gpt3-13b": gpt3(5120, 40, 40),
    "gpt3-175b": gpt3(12288, 96, 96),
}


# --- transformers' words for GPT-1

# In `afn` "gelu" means the tanh form; no other names exist.
GPT1_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
GPT1_ACTIVATIONS_BACK = {own: name for name, own in GPT1_ACTIVATIONS.items() if name != "swish"}


def read_gpt1(settings: Settings) -> ModelConfig:
    width, num_heads = settings.whole("n_embd"), settings.whole("n_head")
    activation = settings.text("afn", "gelu")
    if activation not in GPT1_ACTIVATIONS:
        raise unknown_name(f"afn in {settings.where}:", activation, GPT1_ACTIVATIONS)
    return gpt(
        width=width,
        attentions=[multi_head(width, num_heads)] * settings.whole("n_layer"),
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("n_positions"),
        activation=GPT1_ACTIVATIONS[activation],
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        placement="post",
        tied=settings.flag("tie_word_embeddings", True),
    )


def write_gpt1(config: ModelConfig) -> dict[str, Any]:
    parts = plain_parts(config.decoder)
    data = {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "n_embd": config.width,
        "n_layer": len(parts.stack.layers),
        "n_head": parts.attentions[0].num_heads,
        "n_positions": config.context,
        "vocab_size": config.vocab_size,
        "afn": GPT1_ACTIVATIONS_BACK.get(parts.feed_forward.activation, "gelu"),
        "layer_norm_epsilon": parts.norm.epsilon,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return said_whole(data, config, read_gpt1)


# --- transformers' words for GPT-2

# Of the names of the tanh form, the one the releases have: the last bit depends on it.
GPT2_ACTIVATIONS_BACK = ACTIVATION_NAMES_BACK | {"gelu_tanh": "gelu_new"}


def read_gpt2(settings: Settings) -> ModelConfig:
    """`reorder_and_upcast_attn` changes the rounding of half precision only, and nothing under fused attention."""
    settings.refuse("add_cross_attention", False)
    width, num_heads = settings.whole("n_embd"), settings.whole("n_head")
    by_width = settings.flag("scale_attn_weights", True)
    by_depth = settings.flag("scale_attn_by_inverse_layer_idx", False)
    plain = multi_head(width, num_heads)
    scales = layer_scales(settings.whole("n_layer"), plain.head_width, by_width, by_depth)
    return gpt(
        width=width,
        attentions=[multi_head(width, num_heads, scale=scale) for scale in scales],
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("n_positions"),
        feed_forward=settings.whole("n_inner", 4 * width),
        activation=settings.activation("activation_function", "gelu_new"),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.flag("tie_word_embeddings", True),
    )


def layer_scales(num_layers: int, head_width: int, by_width: bool, by_depth: bool) -> list[float | None]:
    """The scale of the scores in each layer; None: head_width ** -0.5."""
    if not by_depth:
        return [None if by_width else 1.0] * num_layers
    return [(head_width**-0.5 if by_width else 1.0) / (number + 1) for number in range(num_layers)]


def write_gpt2(config: ModelConfig) -> dict[str, Any]:
    parts = plain_parts(config.decoder)
    head_width, scales = parts.attentions[0].head_width, [attention.scale for attention in parts.attentions]
    by_width, by_depth = next(
        (
            flags
            for flags in product((True, False), repeat=2)
            if layer_scales(len(scales), head_width, *flags) == scales
        ),
        (True, False),
    )
    data = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.width,
        "n_layer": len(parts.stack.layers),
        "n_head": parts.attentions[0].num_heads,
        "n_inner": parts.feed_forward.width,
        "n_positions": config.context,
        "vocab_size": config.vocab_size,
        "activation_function": GPT2_ACTIVATIONS_BACK[parts.feed_forward.activation],
        "layer_norm_epsilon": parts.norm.epsilon,
        "scale_attn_weights": by_width,
        "scale_attn_by_inverse_layer_idx": by_depth,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return said_whole(data, config, read_gpt2)


# --- names; matrices are stored (in, out)

LAYER_NAMES: Table = {
    "transformer.h.{layer}.attn.c_attn.weight": Fused(QKV_WEIGHTS, transposed=True),
    "transformer.h.{layer}.attn.c_attn.bias": Fused(QKV_BIASES),
    "transformer.h.{layer}.attn.c_proj.weight": Copy((f"{LAYER}.attention.output.weight",), transposed=True),
    "transformer.h.{layer}.attn.c_proj.bias": f"{LAYER}.attention.output.bias",
    "transformer.h.{layer}.mlp.c_fc.weight": Copy((f"{LAYER}.feed_forward.up.weight",), transposed=True),
    "transformer.h.{layer}.mlp.c_fc.bias": f"{LAYER}.feed_forward.up.bias",
    "transformer.h.{layer}.mlp.c_proj.weight": Copy((f"{LAYER}.feed_forward.down.weight",), transposed=True),
    "transformer.h.{layer}.mlp.c_proj.bias": f"{LAYER}.feed_forward.down.bias",
    "transformer.h.{layer}.ln_1.weight": f"{LAYER}.attention_residual.norm.weight",
    "transformer.h.{layer}.ln_1.bias": f"{LAYER}.attention_residual.norm.bias",
    "transformer.h.{layer}.ln_2.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "transformer.h.{layer}.ln_2.bias": f"{LAYER}.feed_forward_residual.norm.bias",
    "lm_head.weight": "head.weight",
}
GPT1_NAMES: Table = {
    "transformer.tokens_embed.weight": "decoder.embedding.tokens.weight",
    "transformer.positions_embed.weight": "decoder.embedding.positions.weight",
    **LAYER_NAMES,
}
GPT2_NAMES: Table = {
    "transformer.wte.weight": "decoder.embedding.tokens.weight",
    "transformer.wpe.weight": "decoder.embedding.positions.weight",
    **LAYER_NAMES,
    "transformer.ln_f.weight": "decoder.final_norm.weight",
    "transformer.ln_f.bias": "decoder.final_norm.bias",
}
DROPPED = (
    r".*\.attn\.(masked_)?bias",  # the causal mask and its filler, made anew in each call
    r".*\.position_ids",  # 0, 1, 2, …
)

GPT1 = Family(
    name="gpt1",
    presets=GPT1_PRESETS,
    model_types=("openai-gpt",),
    read=read_gpt1,
    write=write_gpt1,
    names=GPT1_NAMES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.tokens_embed.weight"},
    dropped=DROPPED,
)
GPT2 = Family(
    name="gpt2",
    presets=GPT2_PRESETS,
    model_types=("gpt2",),
    read=read_gpt2,
    write=write_gpt2,
    names=GPT2_NAMES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    dropped=DROPPED,
)
GPT3 = Family(name="gpt3", presets=GPT3_PRESETS)
FAMILIES = (GPT1, GPT2, GPT3)
