"""DeBERTa v2 and v3: BERT whose attention scores encode the distance of two tokens instead of their positions.

Queries and keys of distances share the projections of those of tokens. The convolution of the largest v2 models and the
separate projections of v1 are not implemented.
Sources: He et al. 2021, §3; He et al. 2023; the config.json of deberta-v3-small, -base and -large.
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import (
    Classifier,
    Disentangled,
    Head,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    ModelConfig,
)
from clearhead.errors import ClearheadError
from clearhead.families.bert import DUPLICATES as BERT_DUPLICATES
from clearhead.families.bert import HEAD_NAMES, encoder_config, write_encoder
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

_NUM_SCORES = 3  # content to content, content to position, position to content; their sum is scaled


def _classes(config: ModelConfig, settings: Settings) -> EncoderClasses:
    parts = stack_parts(config.encoder)
    pooler = HeadTransform(activation=settings.activation("pooler_hidden_act", "gelu"))
    return EncoderClasses(
        name="DebertaV2",
        language=Head(bias=True, transform=HeadTransform(activation=parts.feed_forward.activation, norm=parts.norm)),
        sequence=Classifier(num_labels=1, reads="first", transform=pooler),
        language_tensors="cls.predictions.",
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    _check(settings)
    context = settings.integer("max_position_embeddings", 512, at_least=1)
    config = encoder_config(
        width=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=context),
        num_token_types=settings.integer("type_vocab_size", 0),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-7),
    )
    parts = stack_parts(config.encoder)
    attention, embedding = parts.attentions[0], parts.stack.token_embedding
    if settings.boolean("relative_attention", False):
        largest = settings.data.get("max_relative_positions", -1)
        position = Disentangled(
            num_buckets=settings.integer("position_buckets", at_least=2),
            max_distance=context if largest in (None, -1) else settings.integer("max_relative_positions", at_least=1),
            norm=LayerNorm(epsilon=parts.norm.epsilon),
        )
        attention = replace(attention, position=position, scale=(_NUM_SCORES * attention.head_width) ** -0.5)
    layer = replace(parts.stack.layers[0], attention=attention)
    if not settings.boolean("position_biased_input", True):
        embedding = replace(embedding, positions=None)
    stack = replace(parts.stack, embedding=embedding, layers=(layer,) * len(parts.stack.layers))
    config = replace(config, encoder=stack)
    return add_heads(config, _classes(config, settings), settings)


def _check(settings: Settings) -> None:
    """Raise ClearheadError for the forms of the family that are not implemented."""
    width, is_relative = settings.integer("hidden_size"), settings.boolean("relative_attention", False)
    kinds = settings.data.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    found = sorted(str(kind).strip() for kind in kinds) if isinstance(kinds, list) else None
    if found != (["c2p", "p2c"] if is_relative else []):
        raise ClearheadError(f"{settings.where}: 'pos_att_type' must be both c2p and p2c, as in DeBERTa v3")
    if is_relative and not settings.boolean("share_att_key", False):
        raise ClearheadError(f"{settings.where}: 'share_att_key' must be true, as in DeBERTa v3")
    if is_relative and settings.string("norm_rel_ebd", "none").strip().lower() != "layer_norm":
        raise ClearheadError(f"{settings.where}: 'norm_rel_ebd' must be 'layer_norm', as in DeBERTa v3")
    for name, value in {"embedding_size": width, "pooler_hidden_size": width, "conv_kernel_size": 0}.items():
        settings.allow_only(name, value)
    settings.allow_only("legacy", True)
    settings.allow_only("tie_word_embeddings", True)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the head that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config, Settings({}, "")), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    position = parts.attentions[0].position
    data = write_encoder(config, parts) | {
        "model_type": "deberta-v2",
        "max_position_embeddings": config.context,
        "position_biased_input": parts.stack.token_embedding.positions is not None,
    }
    if isinstance(position, Disentangled):
        data |= {
            "relative_attention": True,
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "position_buckets": position.num_buckets,
            "max_relative_positions": position.max_distance,
        }
    if config.classifier is not None and config.classifier.transform is not None:
        data["pooler_hidden_act"] = NAMES_BY_ACTIVATION[config.classifier.transform.activation]
    data |= write_heads(config, _classes(config, Settings(data, "deberta-v2")))
    return require_round_trip(data, config, read_config)


def _preset(width: int, num_layers: int, num_heads: int) -> Preset:
    data = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    data |= {"intermediate_size": 4 * width, "vocab_size": 128100, "max_position_embeddings": 512}
    relative = {"relative_attention": True, "share_att_key": True, "pos_att_type": "p2c|c2p", "position_buckets": 256}
    settings = data | relative | {"norm_rel_ebd": "layer_norm", "position_biased_input": False}
    return lambda: read_config(Settings(settings, "deberta-v2"))


PRESETS = {
    "deberta-v3-small": _preset(768, 6, 12),
    "deberta-v3-base": _preset(768, 12, 12),
    "deberta-v3-large": _preset(1024, 24, 16),
}

_LAYER_PARTS = {
    "attention.self.query_proj": "attention.query",
    "attention.self.key_proj": "attention.key",
    "attention.self.value_proj": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_residual.norm",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_residual.norm",
}
NAMES: NameTable = {
    **embedding_names("deberta."),
    **parameter_names("deberta.encoder.layer.{layer}.", f"{ENCODER_LAYER}.", _LAYER_PARTS),
    "deberta.encoder.rel_embeddings.weight": "encoder.relative_bias.rows.weight",
    **parameter_names("deberta.encoder.", "encoder.relative_bias.", {"LayerNorm": "norm"}),
    **HEAD_NAMES,
    **classifier_names("pooler.dense", "classifier"),
}
FAMILY = Family(
    name="deberta",
    presets=PRESETS,
    model_types=("deberta-v2",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="deberta.",
    legacy_suffixes=LEGACY_SUFFIXES,
    duplicates={name: original.replace("bert.", "deberta.") for name, original in BERT_DUPLICATES.items()},
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
