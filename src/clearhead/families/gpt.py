"""GPT-1, GPT-2 and GPT-3: learned positions, biases everywhere, the tanh form of GELU, a tied head.

GPT-1 is post-norm; from GPT-2 on the models are pre-norm. GPT-3 is GPT-2 with banded attention in every other layer.
Sources: Radford et al. 2018 (§4.1), 2019 (Table 2) and the released config.json; Brown et al. 2020 (Table 2.1).
"""

from collections.abc import Iterable
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
from clearhead.families.family import Family, Preset, require_round_trip
from clearhead.families.gpt_style import TOKEN_CLASSIFIER_NAMES, make_layers, multi_head_attention, stack_parts
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import LAYER, QKV_BIASES, QKV_WEIGHTS, Copy, Fused, NameTable


def gpt_config(
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
    """Return a config; `feed_forward` None means four times the width."""
    norm = LayerNorm(epsilon=epsilon)
    inner_width = 4 * width if feed_forward is None else feed_forward
    stack = Stack(
        embedding=Embedding(vocab_size=vocab_size, positions=LearnedPositions(num_positions=context)),
        layers=make_layers(
            attentions, FeedForward(width=inner_width, activation=activation, bias=True), norm, placement
        ),
        final_norm=norm if placement == "pre" else None,
    )
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=tied))


def _gpt1_preset() -> ModelConfig:
    return gpt_config(
        width=768, attentions=[multi_head_attention(768, 12)] * 12, vocab_size=40478, context=512, placement="post"
    )


def _gpt2_preset(width: int, num_layers: int, num_heads: int) -> Preset:
    return lambda: gpt_config(
        width=width, attentions=[multi_head_attention(width, num_heads)] * num_layers, vocab_size=50257, context=1024
    )


def _gpt3_preset(width: int, num_layers: int, num_heads: int, band: int = 256) -> Preset:
    """Return a preset with alternating dense and banded layers.

    Neither the width of the band nor the order is published; 256 and dense first are the choices of GPT-Neo, the open
    reproduction.
    """
    patterns = [SlidingWindow(size=band) if index % 2 else Causal() for index in range(num_layers)]
    return lambda: gpt_config(
        width=width,
        attentions=[multi_head_attention(width, num_heads, pattern=pattern) for pattern in patterns],
        vocab_size=50257,
        context=2048,
    )


_GPT1_PRESETS = {"gpt1": _gpt1_preset}
_GPT2_PRESETS = {
    "gpt2": _gpt2_preset(768, 12, 12),
    "gpt2-medium": _gpt2_preset(1024, 24, 16),
    "gpt2-large": _gpt2_preset(1280, 36, 20),
    "gpt2-xl": _gpt2_preset(1600, 48, 25),
}
# Two rows of Table 2.1 are inconsistent, since heads times head width must be the width: 1.3B lists 24 heads of 128 for
# a width of 2048, and only 16 heads give 1.3B parameters; 13B lists a width of 5140 for 40 heads of 128.
_GPT3_PRESETS = {
    "gpt3-125m": _gpt3_preset(768, 12, 12),
    "gpt3-350m": _gpt3_preset(1024, 24, 16),
    "gpt3-760m": _gpt3_preset(1536, 24, 16),
    "gpt3-1.3b": _gpt3_preset(2048, 24, 16),
    "gpt3-2.7b": _gpt3_preset(2560, 32, 32),
    "gpt3-6.7b": _gpt3_preset(4096, 32, 32),
    "gpt3-13b": _gpt3_preset(5120, 40, 40),
    "gpt3-175b": _gpt3_preset(12288, 96, 96),
}


# --- config.json of GPT-1

# For `afn`, "gelu" means the tanh form; other names do not exist.
_GPT1_ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
_GPT1_NAMES_BY_ACTIVATION = {own: name for name, own in _GPT1_ACTIVATIONS.items() if name != "swish"}


def _read_gpt1(settings: Settings) -> ModelConfig:
    """Return the config that a config.json of GPT-1 describes."""
    width, num_heads = settings.integer("n_embd"), settings.integer("n_head")
    activation = settings.string("afn", "gelu")
    if activation not in _GPT1_ACTIVATIONS:
        raise unknown_name(f"afn in {settings.where}:", activation, _GPT1_ACTIVATIONS)
    return gpt_config(
        width=width,
        attentions=[multi_head_attention(width, num_heads)] * settings.integer("n_layer"),
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions"),
        activation=_GPT1_ACTIVATIONS[activation],
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        placement="post",
        tied=settings.boolean("tie_word_embeddings", True),
    )


def _write_gpt1(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config in the form of GPT-1."""
    parts = stack_parts(config.decoder)
    data = {
        "architectures": ["OpenAIGPTLMHeadModel"],
        "model_type": "openai-gpt",
        "n_embd": config.width,
        "n_layer": len(parts.stack.layers),
        "n_head": parts.attentions[0].num_heads,
        "n_positions": config.context,
        "vocab_size": config.vocab_size,
        "afn": _GPT1_NAMES_BY_ACTIVATION.get(parts.feed_forward.activation, "gelu"),
        "layer_norm_epsilon": parts.norm.epsilon,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return require_round_trip(data, config, _read_gpt1)


# --- config.json of GPT-2

# The releases use this name for the tanh form of GELU; the last bit of the result depends on the name.
GPT2_NAMES_BY_ACTIVATION = NAMES_BY_ACTIVATION | {"gelu_tanh": "gelu_new"}


def _read_gpt2(settings: Settings) -> ModelConfig:
    """Return the config that a config.json of GPT-2 describes.

    `reorder_and_upcast_attn` only changes how half precision is rounded, and nothing with fused attention.
    """
    settings.allow_only("add_cross_attention", False)
    width, num_heads = settings.integer("n_embd"), settings.integer("n_head")
    by_width = settings.boolean("scale_attn_weights", True)
    by_depth = settings.boolean("scale_attn_by_inverse_layer_idx", False)
    head_width = multi_head_attention(width, num_heads).head_width
    scales = _layer_scales(settings.integer("n_layer"), head_width, by_width, by_depth)
    return gpt_config(
        width=width,
        attentions=[multi_head_attention(width, num_heads, scale=scale) for scale in scales],
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("n_positions"),
        feed_forward=settings.integer("n_inner", 4 * width),
        activation=settings.activation("activation_function", "gelu_new"),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.boolean("tie_word_embeddings", True),
    )


def _layer_scales(num_layers: int, head_width: int, by_width: bool, by_depth: bool) -> list[float | None]:
    """Return the scale of the scores in each layer; None means head_width ** -0.5."""
    if not by_depth:
        return [None if by_width else 1.0] * num_layers
    return [(head_width**-0.5 if by_width else 1.0) / (index + 1) for index in range(num_layers)]


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config in the form of GPT-2."""
    parts = stack_parts(config.decoder)
    head_width, scales = parts.attentions[0].head_width, [attention.scale for attention in parts.attentions]
    by_width, by_depth = next(
        (
            flags
            for flags in product((True, False), repeat=2)
            if _layer_scales(len(scales), head_width, *flags) == scales
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
        "activation_function": GPT2_NAMES_BY_ACTIVATION[parts.feed_forward.activation],
        "layer_norm_epsilon": parts.norm.epsilon,
        "scale_attn_weights": by_width,
        "scale_attn_by_inverse_layer_idx": by_depth,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return require_round_trip(data, config, _read_gpt2)


# --- tensor names; matrices are stored (in, out)

_LAYER_NAMES: NameTable = {
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
_GPT1_NAMES: NameTable = {
    "transformer.tokens_embed.weight": "decoder.embedding.tokens.weight",
    "transformer.positions_embed.weight": "decoder.embedding.positions.weight",
    **_LAYER_NAMES,
}
GPT2_NAMES: NameTable = {
    "transformer.wte.weight": "decoder.embedding.tokens.weight",
    "transformer.wpe.weight": "decoder.embedding.positions.weight",
    **_LAYER_NAMES,
    "transformer.ln_f.weight": "decoder.final_norm.weight",
    "transformer.ln_f.bias": "decoder.final_norm.bias",
    **TOKEN_CLASSIFIER_NAMES,
}
IGNORED_TENSORS = (
    r".*\.attn\.(masked_)?bias",  # the causal mask and its fill value, which are computed
    r".*\.position_ids",  # 0, 1, 2, …
)

GPT1 = Family(
    name="gpt1",
    presets=_GPT1_PRESETS,
    model_types=("openai-gpt",),
    read_config=_read_gpt1,
    write_config=_write_gpt1,
    tensor_names=_GPT1_NAMES,
    base_model_prefix="transformer.",
    duplicates={"lm_head.weight": "transformer.tokens_embed.weight"},
    ignored_tensors=IGNORED_TENSORS,
)
GPT2 = Family(
    name="gpt2",
    presets=_GPT2_PRESETS,
    model_types=("gpt2",),
    read_config=_read_gpt2,
    write_config=_write_gpt2,
    tensor_names=GPT2_NAMES,
    base_model_prefix="transformer.",
    duplicates={"lm_head.weight": "transformer.wte.weight"},
    ignored_tensors=IGNORED_TENSORS,
)
GPT3 = Family(name="gpt3", presets=_GPT3_PRESETS)
FAMILIES = (GPT1, GPT2, GPT3)
