"""GPT-Neo: GPT-3's plan with unscaled scores and no bias on queries, keys and values.

Sources: Black et al. 2021 (GPT-Neo release) and the config.json of each size.
"""

from collections.abc import Callable
from typing import Any

from clearhead.architecture import Causal, GroupedAttention, ModelConfig, SlidingWindow
from clearhead.errors import ClearheadError
from clearhead.families.family import Family, said_whole
from clearhead.families.gpt import GPT2_ACTIVATIONS_BACK, GPT2_NAMES, gpt
from clearhead.families.names import LAYER, Table
from clearhead.families.plain import multi_head, plain_parts
from clearhead.families.settings import Settings

Band = Causal | SlidingWindow


def neo_attention(width: int, num_heads: int, pattern: Band) -> GroupedAttention:
    return multi_head(width, num_heads, input_bias=False, scale=1.0, pattern=pattern)


def gpt_neo(width: int, num_layers: int, num_heads: int) -> Callable[[], ModelConfig]:
    reaches: list[Band] = [SlidingWindow(size=256) if number % 2 else Causal() for number in range(num_layers)]
    return lambda: gpt(
        width=width,
        attentions=[neo_attention(width, num_heads, pattern) for pattern in reaches],
        vocab_size=50257,
        context=2048,
    )


PRESETS = {
    "gpt-neo-125m": gpt_neo(768, 12, 12),
    "gpt-neo-1.3b": gpt_neo(2048, 24, 16),
    "gpt-neo-2.7b": gpt_neo(2560, 32, 20),
}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    width, num_heads = settings.whole("hidden_size"), settings.whole("num_heads")
    reaches = read_reaches(settings, settings.whole("num_layers"))
    return gpt(
        width=width,
        attentions=[neo_attention(width, num_heads, pattern) for pattern in reaches],
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("max_position_embeddings"),
        feed_forward=settings.whole("intermediate_size", 4 * width),
        activation=settings.activation("activation_function", "gelu_new"),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.flag("tie_word_embeddings", True),
    )


def read_reaches(settings: Settings, num_layers: int) -> list[Band]:
    """`attention_types` is a list of [pattern, how often], such as [[["global", "local"], 12]]."""
    reaches: dict[str, Band] = {"global": Causal(), "local": SlidingWindow(size=settings.whole("window_size", 256))}
    kinds: list[str] = []
    for group in settings.items("attention_types"):
        match group:
            case [[*pattern], int(times)] if len(pattern) * times <= num_layers:
                kinds += [str(kind) for kind in pattern] * times
    if len(kinds) != num_layers or not set(kinds) <= set(reaches):
        raise ClearheadError(
            f"{settings.where}: 'attention_types' must say global or local for each of the {num_layers} layers"
        )
    return [reaches[kind] for kind in kinds]


def write(config: ModelConfig) -> dict[str, Any]:
    parts = plain_parts(config.decoder)
    windows = [attention.pattern.size for attention in parts.attentions if isinstance(attention.pattern, SlidingWindow)]
    kinds = ["local" if isinstance(attention.pattern, SlidingWindow) else "global" for attention in parts.attentions]
    data = {
        "architectures": ["GPTNeoForCausalLM"],
        "model_type": "gpt_neo",
        "hidden_size": config.width,
        "num_layers": len(parts.stack.layers),
        "num_heads": parts.attentions[0].num_heads,
        "intermediate_size": parts.feed_forward.width,
        "attention_types": [[kinds, 1]],
        "window_size": windows[0] if windows else 256,
        "max_position_embeddings": config.context,
        "vocab_size": config.vocab_size,
        "activation_function": GPT2_ACTIVATIONS_BACK[parts.feed_forward.activation],
        "layer_norm_epsilon": parts.norm.epsilon,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return said_whole(data, config, read)


# The names of GPT-2 but for attention, and matrices stored (out, in) in spite of the same names
NAMES: Table = {
    **{name: row for name, row in GPT2_NAMES.items() if ".attn." not in name},
    "transformer.h.{layer}.attn.attention.q_proj.weight": f"{LAYER}.attention.query.weight",
    "transformer.h.{layer}.attn.attention.k_proj.weight": f"{LAYER}.attention.key.weight",
    "transformer.h.{layer}.attn.attention.v_proj.weight": f"{LAYER}.attention.value.weight",
    "transformer.h.{layer}.attn.attention.out_proj.weight": f"{LAYER}.attention.output.weight",
    "transformer.h.{layer}.attn.attention.out_proj.bias": f"{LAYER}.attention.output.bias",
    "transformer.h.{layer}.mlp.c_fc.weight": f"{LAYER}.feed_forward.up.weight",
    "transformer.h.{layer}.mlp.c_proj.weight": f"{LAYER}.feed_forward.down.weight",
}

FAMILY = Family(
    name="gpt_neo",
    presets=PRESETS,
    model_types=("gpt_neo",),
    read=read,
    write=write,
    names=NAMES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    dropped=(r".*\.attn\.attention\.(masked_)?bias",),  # the mask of each layer, made anew in each call
)
