"""BERT: an encoder with learned positions, segment embeddings and post-norm layers (Devlin et al. 2019, §3).

Head and pooler depend on the checkpoint: masked language models have a head, sentence encoders have none.
Sizes: the paper, §3, with the vocabulary of the uncased release. GELU is the exact form, as in transformers.
"""

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
from clearhead.families.family import Family, Preset, require_round_trip
from clearhead.families.gpt_style import make_layers, multi_head_attention, stack_parts
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import NameTable


def _bert_config(
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
    """Return an encoder with a masked-language-model head."""
    norm = LayerNorm(epsilon=epsilon)
    embedding = Embedding(
        vocab_size=vocab_size,
        positions=LearnedPositions(num_positions=context),
        num_token_types=num_token_types,
        norm=norm,
    )
    attention = multi_head_attention(width, num_heads, pattern=Bidirectional())
    dense = FeedForward(width=feed_forward, activation=activation, bias=True)
    return ModelConfig(
        width=width,
        context=context,
        encoder=Stack(embedding=embedding, layers=make_layers([attention] * num_layers, dense, norm, "post")),
        head=_masked_language_head(dense, norm),
        pooler=pooler,
    )


def _masked_language_head(feed_forward: FeedForward, norm: LayerNorm) -> Head:
    """Return the head that predicts masked tokens."""
    return Head(bias=True, transform=HeadTransform(activation=feed_forward.activation, norm=norm))


def _bert_preset(width: int, num_layers: int, num_heads: int) -> Preset:
    return lambda: _bert_config(width=width, num_layers=num_layers, num_heads=num_heads, feed_forward=4 * width)


PRESETS = {"bert-base": _bert_preset(768, 12, 12), "bert-large": _bert_preset(1024, 24, 16)}


# --- config.json

_WITH_HEAD = ("BertForMaskedLM", "BertForPreTraining")


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes; the class in `architectures` decides about head and pooler.

    transformers takes `add_pooling_layer` as a constructor argument and does not save it; `write_config` does.
    """
    settings.allow_only("position_embedding_type", "absolute")
    settings.allow_only("is_decoder", False)
    settings.allow_only("add_cross_attention", False)
    settings.allow_only("tie_word_embeddings", True)
    architectures = settings.array("architectures")
    config = _bert_config(
        width=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        context=settings.integer("max_position_embeddings"),
        num_token_types=settings.integer("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
        pooler=settings.boolean("add_pooling_layer", "BertForMaskedLM" not in architectures),
    )
    return config if any(name in _WITH_HEAD for name in architectures) else replace(config, head=None)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config a head and a pooler if the checkpoint has them, whichever class config.json names."""
    parts = stack_parts(config.encoder)
    has_head = any(name.startswith("cls.predictions.") for name in tensor_names)
    return replace(
        config,
        head=_masked_language_head(parts.feed_forward, parts.norm) if has_head else None,
        pooler=any(name.endswith("pooler.dense.weight") for name in tensor_names),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
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
        "hidden_act": NAMES_BY_ACTIVATION[parts.feed_forward.activation],
        "layer_norm_eps": parts.norm.epsilon,
        "add_pooling_layer": config.pooler,
    }
    return require_round_trip(data, config, read_config)


# --- tensor names

_ENCODER_LAYER = "encoder.layers.{layer}"
NAMES: NameTable = {
    "bert.embeddings.word_embeddings.weight": "encoder.embedding.tokens.weight",
    "bert.embeddings.position_embeddings.weight": "encoder.embedding.positions.weight",
    "bert.embeddings.token_type_embeddings.weight": "encoder.embedding.types.weight",
    "bert.embeddings.LayerNorm.weight": "encoder.embedding.norm.weight",
    "bert.embeddings.LayerNorm.bias": "encoder.embedding.norm.bias",
    "bert.encoder.layer.{layer}.attention.self.query.weight": f"{_ENCODER_LAYER}.attention.query.weight",
    "bert.encoder.layer.{layer}.attention.self.query.bias": f"{_ENCODER_LAYER}.attention.query.bias",
    "bert.encoder.layer.{layer}.attention.self.key.weight": f"{_ENCODER_LAYER}.attention.key.weight",
    "bert.encoder.layer.{layer}.attention.self.key.bias": f"{_ENCODER_LAYER}.attention.key.bias",
    "bert.encoder.layer.{layer}.attention.self.value.weight": f"{_ENCODER_LAYER}.attention.value.weight",
    "bert.encoder.layer.{layer}.attention.self.value.bias": f"{_ENCODER_LAYER}.attention.value.bias",
    "bert.encoder.layer.{layer}.attention.output.dense.weight": f"{_ENCODER_LAYER}.attention.output.weight",
    "bert.encoder.layer.{layer}.attention.output.dense.bias": f"{_ENCODER_LAYER}.attention.output.bias",
    "bert.encoder.layer.{layer}.attention.output.LayerNorm.weight": f"{_ENCODER_LAYER}.attention_residual.norm.weight",
    "bert.encoder.layer.{layer}.attention.output.LayerNorm.bias": f"{_ENCODER_LAYER}.attention_residual.norm.bias",
    "bert.encoder.layer.{layer}.intermediate.dense.weight": f"{_ENCODER_LAYER}.feed_forward.up.weight",
    "bert.encoder.layer.{layer}.intermediate.dense.bias": f"{_ENCODER_LAYER}.feed_forward.up.bias",
    "bert.encoder.layer.{layer}.output.dense.weight": f"{_ENCODER_LAYER}.feed_forward.down.weight",
    "bert.encoder.layer.{layer}.output.dense.bias": f"{_ENCODER_LAYER}.feed_forward.down.bias",
    "bert.encoder.layer.{layer}.output.LayerNorm.weight": f"{_ENCODER_LAYER}.feed_forward_residual.norm.weight",
    "bert.encoder.layer.{layer}.output.LayerNorm.bias": f"{_ENCODER_LAYER}.feed_forward_residual.norm.bias",
    "bert.pooler.dense.weight": "pooler.weight",
    "bert.pooler.dense.bias": "pooler.bias",
    "cls.predictions.transform.dense.weight": "head.transform.dense.weight",
    "cls.predictions.transform.dense.bias": "head.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight": "head.transform.norm.weight",
    "cls.predictions.transform.LayerNorm.bias": "head.transform.norm.bias",
    "cls.predictions.bias": "head.bias",
}
_LEGACY_SUFFIXES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # TensorFlow's names
DUPLICATES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
IGNORED_TENSORS = (
    r".*\.position_ids",  # 0, 1, 2, …
    r"cls\.seq_relationship\.(weight|bias)",  # next-sentence prediction, used in pretraining only
)

FAMILY = Family(
    name="bert",
    presets=PRESETS,
    model_types=("bert",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="bert.",
    legacy_suffixes=_LEGACY_SUFFIXES,
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
