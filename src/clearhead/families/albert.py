"""ALBERT: BERT whose layers share one set of weights, with a narrow token table (Lan et al. 2020, §3.1).

Sizes: the config.json of the second release (v2).
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import Classifier, Head, HeadTransform, LearnedPositions, ModelConfig
from clearhead.families.bert import encoder_config, write_encoder
from clearhead.families.encoder_style import (
    IGNORED_TENSORS,
    EncoderClasses,
    add_heads,
    adjust_heads,
    embedding_names,
    parameter_names,
    require_encoder,
    write_heads,
)
from clearhead.families.family import Family, Preset, require_round_trip
from clearhead.families.gpt_style import stack_parts
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import Copy, NameTable


def _classes(config: ModelConfig) -> EncoderClasses:
    parts = stack_parts(config.encoder)
    return EncoderClasses(
        name="Albert",
        language=Head(bias=True, transform=HeadTransform(activation=parts.feed_forward.activation, norm=parts.norm)),
        sequence=Classifier(num_labels=1, reads="pooled"),
        pretraining=Classifier(num_labels=2, reads="pooled"),
        poolers=("Model", "ForPreTraining", "ForSequenceClassification"),
        language_tensors="predictions.",
        pretraining_tensors="sop_classifier.",
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    require_encoder(settings)
    settings.allow_only("num_hidden_groups", 1)
    settings.allow_only("inner_group_num", 1)
    config = encoder_config(
        width=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=settings.integer("max_position_embeddings")),
        num_token_types=settings.integer("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu_new"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
    )
    stack = stack_parts(config.encoder).stack
    embedding = replace(stack.token_embedding, width=settings.integer("embedding_size", 128, at_least=1))
    config = replace(config, encoder=replace(stack, embedding=embedding, shared_layers=True))
    return add_heads(config, _classes(config), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the heads and the pooler that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    data = write_encoder(config, parts) | {
        "model_type": "albert",
        "max_position_embeddings": config.context,
        "embedding_size": parts.stack.token_embedding.width,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }
    if parts.feed_forward.activation == "gelu_tanh":
        data["hidden_act"] = "gelu_new"  # as in the releases; transformers rounds it differently
    return require_round_trip(data | write_heads(config, _classes(config)), config, read_config)


def _preset(width: int, num_layers: int, num_heads: int, activation: str = "gelu_new") -> Preset:
    data = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    data |= {"intermediate_size": 4 * width, "vocab_size": 30000, "max_position_embeddings": 512}
    settings = data | {"embedding_size": 128, "hidden_act": activation, "architectures": ["AlbertForMaskedLM"]}
    return lambda: read_config(Settings(settings, "albert"))


PRESETS = {
    "albert-base": _preset(768, 12, 12),
    "albert-large": _preset(1024, 24, 16),
    "albert-xlarge": _preset(2048, 24, 16),
    "albert-xxlarge": _preset(4096, 12, 64, "gelu"),
}

_SHARED_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0."
_LAYER_PARTS = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.dense": "attention.output",
    "attention.LayerNorm": "attention_residual.norm",
    "ffn": "feed_forward.up",
    "ffn_output": "feed_forward.down",
    "full_layer_layer_norm": "feed_forward_residual.norm",
}
NAMES: NameTable = {
    **embedding_names("albert."),
    **parameter_names("albert.encoder.", "encoder.embedding.", {"embedding_hidden_mapping_in": "projection"}),
    **parameter_names(_SHARED_LAYER, "encoder.layers.0.", _LAYER_PARTS),
    **parameter_names("albert.", "", {"pooler": "pooler"}),
    **parameter_names("predictions.", "head.transform.", {"dense": "dense", "LayerNorm": "norm"}),
    "predictions.bias": "head.bias",
    "classifier.weight": Copy(("classifier.scores.weight",), only_without="head.bias"),
    "classifier.bias": Copy(("classifier.scores.bias",), only_without="head.bias"),
    "sop_classifier.classifier.weight": Copy(("classifier.scores.weight",), only_with="head.bias"),
    "sop_classifier.classifier.bias": Copy(("classifier.scores.bias",), only_with="head.bias"),
}
FAMILY = Family(
    name="albert",
    presets=PRESETS,
    model_types=("albert",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="albert.",
    duplicates={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
