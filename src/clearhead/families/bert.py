"""BERT: an encoder with learned positions, segment vectors and norms after each branch (Devlin et al. 2019, §3).

Heads and pooler come and go with the checkpoint: masked-language models have a head, sentence encoders have none.
Sizes: the paper, §3, with the vocabulary of the uncased release. GELU is the exact form, as in transformers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Activation,
    Bidirectional,
    Embedding,
    FeedForward,
    Head,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    Stack,
)
from clearhead.families.family import Family, said_whole
from clearhead.families.names import Table
from clearhead.families.plain import multi_head, plain_layers, plain_parts
from clearhead.families.settings import ACTIVATION_NAMES_BACK, Settings


def bert(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: int,
    vocab_size: int = 30522,
    context: int = 512,
    num_token_types: int = 2,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
    pooler: bool = True,
) -> ModelConfig:
    norm = LayerNorm(epsilon=epsilon)
    embedding = Embedding(
        vocab_size=vocab_size,
        positions=LearnedPositions(num_positions=context),
        num_token_types=num_token_types,
        norm=norm,
    )
    attention = multi_head(width, num_heads, pattern=Bidirectional())
    inner = FeedForward(width=feed_forward, activation=activation, bias=True)
    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(embedding=embedding, layers=plain_layers([attention] * num_layers, inner, norm, "post")),
        head=word_head(inner, norm),
        pooler=pooler,
    )


def word_head(feed_forward: FeedForward, norm: LayerNorm) -> Head:
    return Head(bias=True, transform=HeadTransform(activation=feed_forward.activation, norm=norm))


def released(width: int, num_layers: int, num_heads: int) -> Callable[[], ModelConfig]:
    return lambda: bert(width=width, num_layers=num_layers, num_heads=num_heads, feed_forward=4 * width)


PRESETS = {"bert-base": released(768, 12, 12), "bert-large": released(1024, 24, 16)}


# --- transformers' words

WITH_HEAD = ("BertForMaskedLM", "BertForPreTraining")


def read(settings: Settings) -> ModelConfig:
    """Head and pooler by the class in `architectures`; `add_pooling_layer` is a word for its constructor, not saved."""
    settings.refuse("position_embedding_type", "absolute")
    settings.refuse("is_decoder", False)
    settings.refuse("add_cross_attention", False)
    settings.refuse("tie_word_embeddings", True)
    architectures = settings.items("architectures")
    config = bert(
        width=settings.whole("hidden_size"),
        num_layers=settings.whole("num_hidden_layers"),
        num_heads=settings.whole("num_attention_heads"),
        feed_forward=settings.whole("intermediate_size"),
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("max_position_embeddings"),
        num_token_types=settings.whole("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
        pooler=settings.flag("add_pooling_layer", "BertForMaskedLM" not in architectures),
    )
    return config if any(name in WITH_HEAD for name in architectures) else replace(config, head=None)


def settle(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Checkpoints often hold more or less than the class in their config: sentence encoders, heads left on."""
    parts = plain_parts(config.encoder)
    has_head = any(name.startswith("cls.predictions.") for name in tensor_names)
    return replace(
        config,
        head=word_head(parts.feed_forward, parts.norm) if has_head else None,
        pooler=any(name.endswith("pooler.dense.weight") for name in tensor_names),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    parts = plain_parts(config.encoder)
    embedding = parts.stack.embedding
    data = {
        "architectures": ["BertForMaskedLM" if config.head else "BertModel"],
        "model_type": "bert",
        "hidden_size": config.width,
        "num_hidden_layers": len(parts.stack.layers),
        "num_attention_heads": parts.attentions[0].num_heads,
        "intermediate_size": parts.feed_forward.width,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "type_vocab_size": embedding.num_token_types,
        "hidden_act": ACTIVATION_NAMES_BACK[parts.feed_forward.activation],
        "layer_norm_eps": parts.norm.epsilon,
        "add_pooling_layer": config.pooler,
    }
    return said_whole(data, config, read)


ENCODER_LAYER = "encoder.layers.{layer}"
NAMES: Table = {
    "bert.embeddings.word_embeddings.weight": "encoder.embedding.tokens.weight",
    "bert.embeddings.position_embeddings.weight": "encoder.embedding.positions.weight",
    "bert.embeddings.token_type_embeddings.weight": "encoder.embedding.types.weight",
    "bert.embeddings.LayerNorm.weight": "encoder.embedding.norm.weight",
    "bert.embeddings.LayerNorm.bias": "encoder.embedding.norm.bias",
    "bert.encoder.layer.{layer}.attention.self.query.weight": f"{ENCODER_LAYER}.attention.query.weight",
    "bert.encoder.layer.{layer}.attention.self.query.bias": f"{ENCODER_LAYER}.attention.query.bias",
    "bert.encoder.layer.{layer}.attention.self.key.weight": f"{ENCODER_LAYER}.attention.key.weight",
    "bert.encoder.layer.{layer}.attention.self.key.bias": f"{ENCODER_LAYER}.attention.key.bias",
    "bert.encoder.layer.{layer}.attention.self.value.weight": f"{ENCODER_LAYER}.attention.value.weight",
    "bert.encoder.layer.{layer}.attention.self.value.bias": f"{ENCODER_LAYER}.attention.value.bias",
    "bert.encoder.layer.{layer}.attention.output.dense.weight": f"{ENCODER_LAYER}.attention.output.weight",
    "bert.encoder.layer.{layer}.attention.output.dense.bias": f"{ENCODER_LAYER}.attention.output.bias",
    "bert.encoder.layer.{layer}.attention.output.LayerNorm.weight": f"{ENCODER_LAYER}.attention_residual.norm.weight",
    "bert.encoder.layer.{layer}.attention.output.LayerNorm.bias": f"{ENCODER_LAYER}.attention_residual.norm.bias",
    "bert.encoder.layer.{layer}.intermediate.dense.weight": f"{ENCODER_LAYER}.feed_forward.up.weight",
    "bert.encoder.layer.{layer}.intermediate.dense.bias": f"{ENCODER_LAYER}.feed_forward.up.bias",
    "bert.encoder.layer.{layer}.output.dense.weight": f"{ENCODER_LAYER}.feed_forward.down.weight",
    "bert.encoder.layer.{layer}.output.dense.bias": f"{ENCODER_LAYER}.feed_forward.down.bias",
    "bert.encoder.layer.{layer}.output.LayerNorm.weight": f"{ENCODER_LAYER}.feed_forward_residual.norm.weight",
    "bert.encoder.layer.{layer}.output.LayerNorm.bias": f"{ENCODER_LAYER}.feed_forward_residual.norm.bias",
    "bert.pooler.dense.weight": "pooler.weight",
    "bert.pooler.dense.bias": "pooler.bias",
    "cls.predictions.transform.dense.weight": "head.transform.dense.weight",
    "cls.predictions.transform.dense.bias": "head.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight": "head.transform.norm.weight",
    "cls.predictions.transform.LayerNorm.bias": "head.transform.norm.bias",
    "cls.predictions.bias": "head.bias",
}
OLDER_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # named after TensorFlow's
COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
DROPPED = (
    r".*\.position_ids",  # 0, 1, 2, …
    r"cls\.seq_relationship\.(weight|bias)",  # "is this the next sentence?": a task of pretraining alone
)

FAMILY = Family(
    name="bert",
    presets=PRESETS,
    model_types=("bert",),
    read=read,
    write=write,
    names=NAMES,
    prefix="bert.",
    older_endings=OLDER_ENDINGS,
    copies=COPIES,
    dropped=DROPPED,
    settle=settle,
)
