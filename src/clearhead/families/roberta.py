"""RoBERTa, XLM-R, CamemBERT: BERT whose positions start after the id of the padding token.

The table of positions has `pad_token_id + 1` unused rows at its start. The language head has its own names.
Sources: Liu et al. 2019, §3; Conneau et al. 2020, §3; Martin et al. 2020, §4; the config.json of each release.
"""

from typing import Any

from clearhead.architecture import Classifier, Head, HeadTransform, LearnedPositions, ModelConfig
from clearhead.families.bert import encoder_config, write_encoder
from clearhead.families.encoder_style import (
    IGNORED_TENSORS,
    LEGACY_SUFFIXES,
    EncoderClasses,
    add_heads,
    adjust_heads,
    bert_names,
    classifier_names,
    parameter_names,
    require_encoder,
    write_heads,
)
from clearhead.families.family import Family, Preset, require_round_trip, require_type
from clearhead.families.gpt_style import stack_parts
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import NameTable

# transformers' defaults are those of BERT; every release states its own
_CLASS_NAMES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}


def _classes(config: ModelConfig, name: str) -> EncoderClasses:
    transform = HeadTransform(activation="gelu", norm=stack_parts(config.encoder).norm)
    return EncoderClasses(
        name=name,
        language=Head(bias=True, transform=transform),
        sequence=Classifier(num_labels=1, reads="first", transform=HeadTransform(activation="tanh")),
        poolers=("Model",),
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    require_encoder(settings)
    offset = settings.integer("pad_token_id", 1) + 1
    num_rows = settings.integer("max_position_embeddings", 512, at_least=offset + 1)
    config = encoder_config(
        width=settings.integer("hidden_size"),
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=num_rows - offset, offset=offset),
        num_token_types=settings.integer("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
    )
    return add_heads(config, _classes(config, _CLASS_NAMES[settings.string("model_type", "roberta")]), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the head and the pooler that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config, ""), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config. All three model types compute the same."""
    parts = stack_parts(config.encoder)
    positions = require_type(LearnedPositions, parts.stack.token_embedding.positions)
    data = write_encoder(config, parts) | {
        "model_type": "roberta",
        "max_position_embeddings": positions.num_positions + positions.offset,
        "pad_token_id": positions.offset - 1,
    }
    return require_round_trip(data | write_heads(config, _classes(config, "Roberta")), config, read_config)


def _preset(width: int, num_layers: int, num_heads: int, vocab_size: int, model_type: str = "roberta") -> Preset:
    data = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    data |= {"intermediate_size": 4 * width, "vocab_size": vocab_size, "max_position_embeddings": 514}
    settings = data | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "model_type": model_type}
    architecture = f"{_CLASS_NAMES[model_type]}ForMaskedLM"
    return lambda: read_config(Settings(settings | {"architectures": [architecture]}, model_type))


PRESETS = {
    "roberta-base": _preset(768, 12, 12, 50265),
    "roberta-large": _preset(1024, 24, 16, 50265),
    "xlm-roberta-base": _preset(768, 12, 12, 250002, "xlm-roberta"),
    "xlm-roberta-large": _preset(1024, 24, 16, 250002, "xlm-roberta"),
    "camembert-base": _preset(768, 12, 12, 32005, "camembert"),
}

LANGUAGE_HEAD_NAMES = {
    **parameter_names("lm_head.", "head.transform.", {"dense": "dense", "layer_norm": "norm"}),
    "lm_head.bias": "head.bias",
}
NAMES: NameTable = {
    **bert_names("roberta."),
    **LANGUAGE_HEAD_NAMES,
    **classifier_names("classifier.dense", "classifier.out_proj"),
}
DUPLICATES = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}

FAMILY = Family(
    name="roberta",
    presets=PRESETS,
    model_types=tuple(_CLASS_NAMES),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="roberta.",
    legacy_suffixes=LEGACY_SUFFIXES,
    duplicates=DUPLICATES,
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
