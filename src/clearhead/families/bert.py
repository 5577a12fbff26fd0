"""BERT: an encoder with learned positions, segment embeddings and post-norm layers (Devlin et al. 2019, §3).

Head and pooler depend on the checkpoint: masked language models have a head, sentence encoders have none, and
BertForPreTraining also predicts whether the second sentence follows the first.
Sizes: the paper, §3, with the vocabulary of the uncased release. GELU is the exact form, as in transformers.
"""

from typing import Any

from clearhead.architecture import (
    Activation,
    Bidirectional,
    Classifier,
    Embedding,
    FeedForward,
    Head,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
    Stack,
)
from clearhead.families.encoder_style import (
    IGNORED_TENSORS,
    LEAVES,
    LEGACY_SUFFIXES,
    EncoderClasses,
    add_heads,
    adjust_heads,
    bert_names,
    parameter_names,
    require_encoder,
    write_heads,
)
from clearhead.families.family import Family, Preset, require_round_trip
from clearhead.families.gpt_style import StackParts, make_layers, multi_head_attention, stack_parts
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import Copy, NameTable


def encoder_config(
    *,
    width: int,
    num_layers: int,
    num_heads: int,
    feed_forward: int,
    vocab_size: int,
    positions: LearnedPositions,
    num_token_types: int = 0,
    activation: Activation = "gelu",
    epsilon: float = 1e-12,
) -> ModelConfig:
    """Return an encoder like BERT without heads."""
    norm = LayerNorm(epsilon=epsilon)
    embedding = Embedding(vocab_size=vocab_size, positions=positions, num_token_types=num_token_types, norm=norm)
    attention = multi_head_attention(width, num_heads, pattern=Bidirectional())
    dense = FeedForward(width=feed_forward, activation=activation, bias=True)
    layers = make_layers([attention] * num_layers, dense, norm, "post")
    return ModelConfig(width=width, context=positions.num_positions, encoder=Stack(embedding=embedding, layers=layers))


def _classes(parts: StackParts) -> EncoderClasses:
    transform = HeadTransform(activation=parts.feed_forward.activation, norm=parts.norm)
    return EncoderClasses(
        name="Bert",
        language=Head(bias=True, transform=transform),
        sequence=Classifier(num_labels=1, reads="pooled"),
        pretraining=Classifier(num_labels=2, reads="pooled"),
        poolers=("Model", "ForPreTraining", "ForSequenceClassification"),
        language_tensors="cls.predictions.",
        pretraining_tensors="cls.seq_relationship.",
    )


def _bert_preset(width: int, num_layers: int, num_heads: int) -> Preset:
    sizes = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    sizes |= {"intermediate_size": 4 * width, "vocab_size": 30522, "max_position_embeddings": 512}
    data = sizes | {"architectures": ["BertForMaskedLM"], "add_pooling_layer": True}
    return lambda: read_config(Settings(data, "bert"))


PRESETS = {"bert-base": _bert_preset(768, 12, 12), "bert-large": _bert_preset(1024, 24, 16)}


# --- config.json


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes; the class in `architectures` decides about heads and pooler."""
    require_encoder(settings)
    config = encoder_config(
        width=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=settings.integer("max_position_embeddings")),
        num_token_types=settings.integer("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
    )
    return add_heads(config, _classes(stack_parts(config.encoder)), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the heads and the pooler that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(stack_parts(config.encoder)), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    data = write_encoder(config, parts) | {"model_type": "bert", "max_position_embeddings": config.context}
    return require_round_trip(data | write_heads(config, _classes(parts)), config, read_config)


def write_encoder(config: ModelConfig, parts: StackParts) -> dict[str, Any]:
    """Return the settings of the sizes of an encoder like BERT."""
    return {
        "hidden_size": config.width,
        "num_hidden_layers": len(parts.stack.layers),
        "num_attention_heads": parts.attentions[0].num_heads,
        "intermediate_size": parts.feed_forward.width,
        "vocab_size": config.vocab_size,
        "type_vocab_size": parts.stack.token_embedding.num_token_types,
        "hidden_act": NAMES_BY_ACTIVATION[parts.feed_forward.activation],
        "layer_norm_eps": parts.norm.epsilon,
    }


# --- tensor names

_HEAD_PARTS = {
    "cls.predictions.transform.dense": "head.transform.dense",
    "cls.predictions.transform.LayerNorm": "head.transform.norm",
}
HEAD_NAMES = {**parameter_names("", "", _HEAD_PARTS), "cls.predictions.bias": "head.bias"}
NAMES: NameTable = {
    **bert_names("bert."),
    **HEAD_NAMES,
    **{f"classifier.{leaf}": Copy((f"classifier.scores.{leaf}",), only_without="head.bias") for leaf in LEAVES},
    **{f"cls.seq_relationship.{leaf}": Copy((f"classifier.scores.{leaf}",), only_with="head.bias") for leaf in LEAVES},
}
DUPLICATES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

FAMILY = Family(
    name="bert",
    presets=PRESETS,
    model_types=("bert",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="bert.",
    legacy_suffixes=LEGACY_SUFFIXES,
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
