"""MPNet: RoBERTa without segments, with T5's relative-position buckets beside its learned positions.

Sources: Song et al. 2020, §2; the config.json of mpnet-base. transformers uses 32 buckets whatever config.json says.
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import Classifier, Head, HeadTransform, LearnedPositions, ModelConfig, RelativeBuckets
from clearhead.families.bert import encoder_config, write_encoder
from clearhead.families.encoder_style import (
    ENCODER_LAYER,
    IGNORED_TENSORS,
    EncoderClasses,
    add_heads,
    adjust_heads,
    classifier_names,
    embedding_names,
    parameter_names,
    write_heads,
)
from clearhead.families.family import Family, require_round_trip, require_type
from clearhead.families.gpt_style import stack_parts
from clearhead.families.roberta import LANGUAGE_HEAD_NAMES
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import NameTable

_BUCKETS = RelativeBuckets(num_buckets=32, max_distance=128, bidirectional=True)
_OFFSET = 2  # unused rows of the table of positions: transformers always counts from the padding id 1


def _classes(config: ModelConfig) -> EncoderClasses:
    return EncoderClasses(
        name="MPNet",
        language=Head(bias=True, transform=HeadTransform(activation="gelu", norm=stack_parts(config.encoder).norm)),
        sequence=Classifier(num_labels=1, reads="first", transform=HeadTransform(activation="tanh")),
        poolers=("Model",),
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    settings.allow_only("relative_attention_num_buckets", _BUCKETS.num_buckets)
    settings.allow_only("tie_word_embeddings", True)
    num_rows = settings.integer("max_position_embeddings", at_least=_OFFSET + 1)
    config = encoder_config(
        width=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=num_rows - _OFFSET, offset=_OFFSET),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
    )
    parts = stack_parts(config.encoder)
    layer = replace(parts.stack.layers[0], attention=replace(parts.attentions[0], position=_BUCKETS))
    stack = replace(parts.stack, layers=(layer,) * len(parts.stack.layers))
    return add_heads(replace(config, encoder=stack), _classes(config), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the head and the pooler that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    positions = require_type(LearnedPositions, parts.stack.token_embedding.positions)
    data = write_encoder(config, parts) | {
        "model_type": "mpnet",
        "max_position_embeddings": positions.num_positions + positions.offset,
        "relative_attention_num_buckets": require_type(RelativeBuckets, parts.attentions[0].position).num_buckets,
    }
    return require_round_trip(data | write_heads(config, _classes(config)), config, read_config)


_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_BASE |= {"vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}  # type: ignore[dict-item]
PRESETS = {"mpnet-base": lambda: read_config(Settings(_BASE | {"architectures": ["MPNetForMaskedLM"]}, "mpnet"))}

_LAYER_PARTS = {
    "attention.attn.q": "attention.query",
    "attention.attn.k": "attention.key",
    "attention.attn.v": "attention.value",
    "attention.attn.o": "attention.output",
    "attention.LayerNorm": "attention_residual.norm",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_residual.norm",
}
NAMES: NameTable = {
    **embedding_names("mpnet."),
    **parameter_names("mpnet.encoder.layer.{layer}.", f"{ENCODER_LAYER}.", _LAYER_PARTS),
    "mpnet.encoder.relative_attention_bias.weight": "encoder.relative_bias.weight",
    **parameter_names("mpnet.", "", {"pooler.dense": "pooler"}),
    **LANGUAGE_HEAD_NAMES,
    **classifier_names("classifier.dense", "classifier.out_proj"),
}
FAMILY = Family(
    name="mpnet",
    presets=PRESETS,
    model_types=("mpnet",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="mpnet.",
    duplicates={
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
