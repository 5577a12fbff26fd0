"""BLOOM: ALiBi, a norm on the embeddings and biases everywhere (Le Scao et al. 2022, §3.2).

Sizes: the paper, Table 3, and the config.json of each release.
"""

from typing import Any

from clearhead.architecture import Alibi, Embedding, FeedForward, Head, LayerNorm, ModelConfig, Stack
from clearhead.families.family import Family, Preset, require_round_trip
from clearhead.families.gpt_style import TOKEN_CLASSIFIER_NAMES, make_layers, multi_head_attention, stack_parts
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import LAYER, QKV_BIASES, QKV_WEIGHTS, FusedPerHead, NameTable


def bloom_config(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 250880,
    context: int = 2048,
    epsilon: float = 1e-5,
    tied: bool = True,
) -> ModelConfig:
    """Return a config; the feed-forward is four times as wide as the model."""
    norm = LayerNorm(epsilon=epsilon)
    attention = multi_head_attention(width, num_heads, position=Alibi())
    dense = FeedForward(width=4 * width, activation="gelu_tanh", bias=True)
    stack = Stack(
        embedding=Embedding(vocab_size=vocab_size, norm=norm),
        layers=make_layers([attention] * num_layers, dense, norm),
        final_norm=norm,
    )
    return ModelConfig(width=width, context=context, decoder=stack, head=Head(tied=tied))


def _bloom_preset(width: int, num_layers: int, num_heads: int) -> Preset:
    return lambda: bloom_config(width=width, num_layers=num_layers, num_heads=num_heads)


PRESETS = {
    "bloom-560m": _bloom_preset(1024, 24, 16),
    "bloom-1b1": _bloom_preset(1536, 24, 16),
    "bloom-1b7": _bloom_preset(2048, 24, 16),
    "bloom-3b": _bloom_preset(2560, 30, 32),
    "bloom-7b1": _bloom_preset(4096, 30, 32),
    "bloom-176b": _bloom_preset(14336, 70, 112),
}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes.

    The releases use `n_embed` and `num_attention_heads` where transformers writes `hidden_size` and `n_head`.
    `slow_but_exact` is not supported because transformers then leaves out two biases.
    """
    width = _read_either(settings, "hidden_size", "n_embed")
    settings.allow_only("apply_residual_connection_post_layernorm", False)
    settings.allow_only("slow_but_exact", False)
    settings.allow_only("n_inner", 4 * width)
    return bloom_config(
        width=width,
        num_layers=_read_either(settings, "n_layer", "num_hidden_layers"),
        num_heads=_read_either(settings, "n_head", "num_attention_heads"),
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("seq_length", 2048),
        epsilon=settings.number("layer_norm_epsilon", 1e-5),
        tied=settings.boolean("tie_word_embeddings", True),
    )


def _read_either(settings: Settings, name: str, released_name: str) -> int:
    return settings.integer(released_name if released_name in settings else name)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.decoder)
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
    return require_round_trip(data, config, read_config)


NAMES: NameTable = {
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
    **TOKEN_CLASSIFIER_NAMES,
}

FAMILY = Family(
    name="bloom",
    presets=PRESETS,
    model_types=("bloom",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="transformer.",
    duplicates={"lm_head.weight": "transformer.word_embeddings.weight"},
)
