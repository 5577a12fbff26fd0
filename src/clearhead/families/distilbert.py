"""DistilBERT: BERT with half the layers, without segments and without pooler (Sanh et al. 2019, §2).

Sizes: the config.json of the uncased and the multilingual release. Every norm has the epsilon 1e-12.
"""

from typing import Any

from clearhead.architecture import Classifier, Head, HeadTransform, LearnedPositions, ModelConfig
from clearhead.families.bert import encoder_config
from clearhead.families.encoder_style import (
    ENCODER_LAYER,
    IGNORED_TENSORS,
    LEGACY_SUFFIXES,
    EncoderClasses,
    add_heads,
    adjust_heads,
    classifier_names,
    embedding_names,
    parameter_names,
    write_heads,
)
from clearhead.families.family import Family, Preset, require_round_trip
from clearhead.families.gpt_style import stack_parts
from clearhead.families.settings import NAMES_BY_ACTIVATION, Settings
from clearhead.families.tensor_rules import NameTable


def _classes(config: ModelConfig) -> EncoderClasses:
    parts = stack_parts(config.encoder)
    return EncoderClasses(
        name="DistilBert",
        language=Head(bias=True, transform=HeadTransform(activation=parts.feed_forward.activation, norm=parts.norm)),
        sequence=Classifier(num_labels=1, reads="first", transform=HeadTransform(activation="relu")),
        language_tensors="vocab_",
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    settings.allow_only("sinusoidal_pos_embds", False)
    settings.allow_only("tie_word_embeddings", True)
    config = encoder_config(
        width=settings.integer("dim"),
        num_layers=settings.integer("n_layers"),
        num_heads=settings.integer("n_heads"),
        feed_forward=settings.integer("hidden_dim"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=settings.integer("max_position_embeddings")),
        activation=settings.activation("activation", "gelu"),
    )
    return add_heads(config, _classes(config), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the head that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    data = {
        "model_type": "distilbert",
        "dim": config.width,
        "n_layers": len(parts.stack.layers),
        "n_heads": parts.attentions[0].num_heads,
        "hidden_dim": parts.feed_forward.width,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "activation": NAMES_BY_ACTIVATION[parts.feed_forward.activation],
    }
    return require_round_trip(data | write_heads(config, _classes(config)), config, read_config)


def _preset(vocab_size: int) -> Preset:
    data = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "max_position_embeddings": 512}
    settings = data | {"vocab_size": vocab_size, "architectures": ["DistilBertForMaskedLM"]}
    return lambda: read_config(Settings(settings, "distilbert"))


PRESETS = {"distilbert-base": _preset(30522), "distilbert-base-multilingual": _preset(119547)}

_LAYER_PARTS = {
    "attention.q_lin": "attention.query",
    "attention.k_lin": "attention.key",
    "attention.v_lin": "attention.value",
    "attention.out_lin": "attention.output",
    "sa_layer_norm": "attention_residual.norm",
    "ffn.lin1": "feed_forward.up",
    "ffn.lin2": "feed_forward.down",
    "output_layer_norm": "feed_forward_residual.norm",
}
NAMES: NameTable = {
    **embedding_names("distilbert."),
    **parameter_names("distilbert.transformer.layer.{layer}.", f"{ENCODER_LAYER}.", _LAYER_PARTS),
    **parameter_names("vocab_", "head.transform.", {"transform": "dense", "layer_norm": "norm"}),
    "vocab_projector.bias": "head.bias",
    **classifier_names("pre_classifier", "classifier"),
}
FAMILY = Family(
    name="distilbert",
    presets=PRESETS,
    model_types=("distilbert",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="distilbert.",
    legacy_suffixes=LEGACY_SUFFIXES,
    duplicates={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
