"""BLOOM: ALiBi instead of positions, a norm on the embeddings, biases everywhere (Le Scao et al. 2022, §3.2).

Sizes: the paper, Table 3, and the config.json of each release.
"""

from collections.abc import Callable
from typing import Any

from clearhead.architecture import Alibi, Embedding, FeedForward, Head, LayerNorm, ModelConfig, Stack
from clearhead.families.family import Family, said_whole
from clearhead.families.names import LAYER, QKV_BIASES, QKV_WEIGHTS, FusedPerHead, Table
from clearhead.families.plain import multi_head, plain_layers, plain_parts
from clearhead.families.settings import Settings


def bloom(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 250880,
    context: int = 2048,
    epsilon: float = 1e-5,
    tied: bool = True,
) -> ModelConfig:
    norm = LayerNorm(epsilon=epsilon)
    attention = multi_head(width, num_heads, position=Alibi())
    inner = FeedForward(width=4 * width, activation="gelu_tanh", bias=True)
    stack = Stack(
        embedding=Embedding(vocab_size=vocab_size, norm=norm),
        layers=plain_layers([attention] * num_layers, inner, norm),
        final_norm=norm,
    )
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=tied))


def released(width: int, num_layers: int, num_heads: int) -> Callable[[], ModelConfig]:
    return lambda: bloom(width=width, num_layers=num_layers, num_heads=num_heads)


PRESETS = {
    "bloom-560m": released(1024, 24, 16),
    "bloom-1b1": released(1536, 24, 16),
    "bloom-1b7": released(2048, 24, 16),
    "bloom-3b": released(2560, 30, 32),
    "bloom-7b1": released(4096, 30, 32),
    "bloom-176b": released(14336, 70, 112),
}


# --- transformers' words


def read(settings: Settings) -> ModelConfig:
    """The releases say `n_embed` and `num_attention_heads` where transformers writes `hidden_size` and `n_head`.

    `slow_but_exact` is refused because transformers then leaves out two biases.
    """
    width = either(settings, "hidden_size", "n_embed")
    settings.refuse("apply_residual_connection_post_layernorm", False)
    settings.refuse("slow_but_exact", False)
    settings.refuse("n_inner", 4 * width)
    return bloom(
        width=width,
        num_layers=either(settings, "n_layer", "num_hidden_layers"),
        num_heads=either(settings, "n_head", "num_attention_heads"),
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("seq_length", 2048),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.flag("tie_word_embeddings", True),
    )


def either(settings: Settings, name: str, other: str) -> int:
    return settings.whole(other if other in settings else name)


def write(config: ModelConfig) -> dict[str, Any]:
    parts = plain_parts(config.decoder)
    data = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": config.width,
        "n_layer": len(parts.stack.layers),
        "n_head": parts.attentions[0].num_heads,
        "vocab_size": config.vocab_size,
        "seq_length": config.context,
        "layer_norm_epsilon": parts.norm.epsilon,
        "tie_word_embeddings": config.head is not None and config.head.tied,
    }
    return said_whole(data, config, read)


NAMES: Table = {
    "transformer.word_embeddings.weight": "decoder.embedding.tokens.weight",
    "transformer.word_embeddings_layernorm.weight": "decoder.embedding.norm.weight",
    "transformer.word_embeddings_layernorm.bias": "decoder.embedding.norm.bias",
    "transformer.h.{layer}.self_attention.query_key_value.weight": FusedPerHead(QKV_WEIGHTS),
    "transformer.h.{layer}.self_attention.query_key_value.bias": FusedPerHead(QKV_BIASES),
    "transformer.h.{layer}.self_attention.dense.weight": f"{LAYER}.attention.output.weight",
    "transformer.h.{layer}.self_attention.dense.bias": f"{LAYER}.attention.output.bias",
    "transformer.h.{layer}.mlp.dense_h_to_4h.weight": f"{LAYER}.feed_forward.up.weight",
    "transformer.h.{layer}.mlp.dense_h_to_4h.bias": f"{LAYER}.feed_forward.up.bias",
    "transformer.h.{layer}.mlp.dense_4h_to_h.weight": f"{LAYER}.feed_forward.down.weight",
    "transformer.h.{layer}.mlp.dense_4h_to_h.bias": f"{LAYER}.feed_forward.down.bias",
    "transformer.h.{layer}.input_layernorm.weight": f"{LAYER}.attention_residual.norm.weight",
    "transformer.h.{layer}.input_layernorm.bias": f"{LAYER}.attention_residual.norm.bias",
    "transformer.h.{layer}.post_attention_layernorm.weight": f"{LAYER}.feed_forward_residual.norm.weight",
    "transformer.h.{layer}.post_attention_layernorm.bias": f"{LAYER}.feed_forward_residual.norm.bias",
    "transformer.ln_f.weight": "decoder.final_norm.weight",
    "transformer.ln_f.bias": "decoder.final_norm.bias",
    "lm_head.weight": "head.weight",
}

FAMILY = Family(
    name="bloom",
    presets=PRESETS,
    model_types=("bloom",),
    read=read,
    write=write,
    names=NAMES,
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
