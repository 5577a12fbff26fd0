"""ELECTRA: BERT whose token table may be narrower than its layers, without pooler (Clark et al. 2020, §3).

The generator predicts masked tokens; the discriminator scores each token as original or replaced.
Sizes: the config.json of the released discriminators.
"""

from dataclasses import replace
from typing import Any

from clearhead.architecture import Classifier, Head, HeadTransform, LearnedPositions, ModelConfig
from clearhead.families.bert import encoder_config, write_encoder
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
from clearhead.families.gpt_style import stack_parts
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import Copy, NameTable


def _classes(config: ModelConfig) -> EncoderClasses:
    parts = stack_parts(config.encoder)
    return EncoderClasses(
        name="Electra",
        language=Head(bias=True, transform=HeadTransform(activation="gelu", norm=parts.norm)),
        sequence=Classifier(num_labels=1, reads="first", transform=HeadTransform(activation="gelu")),
        pretraining=Classifier(
            num_labels=1, reads="tokens", transform=HeadTransform(activation=parts.feed_forward.activation)
        ),
        pretrains_language=False,
        language_tensors="generator_",
        pretraining_tensors="discriminator_predictions.",
    )


def read_config(settings: Settings) -> ModelConfig:
    """Return the config that a config.json describes."""
    require_encoder(settings)
    width = settings.integer("hidden_size")
    table_width = settings.integer("embedding_size", 128, at_least=1)
    config = encoder_config(
        width=width,
        num_layers=settings.integer("num_hidden_layers"),
        num_heads=settings.integer("num_attention_heads"),
        feed_forward=settings.integer("intermediate_size"),
        vocab_size=settings.integer("vocab_size"),
        positions=LearnedPositions(num_positions=settings.integer("max_position_embeddings")),
        num_token_types=settings.integer("type_vocab_size", 2),
        activation=settings.activation("hidden_act", "gelu"),
        epsilon=settings.number("layer_norm_eps", 1e-12),
    )
    stack = stack_parts(config.encoder).stack
    embedding = replace(stack.token_embedding, width=None if table_width == width else table_width)
    return add_heads(replace(config, encoder=replace(stack, embedding=embedding)), _classes(config), settings)


def adjust_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Give the config the head that the checkpoint has, whichever class config.json names."""
    return adjust_heads(config, _classes(config), tensor_names)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json that describes a config."""
    parts = stack_parts(config.encoder)
    data = write_encoder(config, parts) | {
        "model_type": "electra",
        "max_position_embeddings": config.context,
        "embedding_size": parts.stack.token_embedding.width or config.width,
    }
    return require_round_trip(data | write_heads(config, _classes(config)), config, read_config)


def _preset(width: int, num_layers: int, num_heads: int, table_width: int) -> Preset:
    data = {"hidden_size": width, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    data |= {"intermediate_size": 4 * width, "vocab_size": 30522, "max_position_embeddings": 512}
    settings = data | {"embedding_size": table_width, "architectures": ["ElectraForPreTraining"]}
    return lambda: read_config(Settings(settings, "electra"))


PRESETS = {
    "electra-small": _preset(256, 12, 4, 128),
    "electra-base": _preset(768, 12, 12, 768),
    "electra-large": _preset(1024, 24, 16, 1024),
}

_DENSE, _SCORES = "classifier.transform.dense", "classifier.scores"
_CLASSIFIERS = {  # module -> our module, what the classifier reads, whether it has a dense layer
    "discriminator_predictions.dense": (_DENSE, "tokens", True),
    "discriminator_predictions.dense_prediction": (_SCORES, "tokens", True),
    "classifier.dense": (_DENSE, "first", True),
    "classifier.out_proj": (_SCORES, "first", True),
    "classifier": (_SCORES, "tokens", False),
}


def _classifier_rule(own: str, reads: str, has_dense: bool) -> Copy:
    marker = f"{_DENSE}.weight"
    return Copy(
        (own,),
        only_reads=(reads,),
        only_with=marker if has_dense else None,
        only_without=None if has_dense else marker,
    )


NAMES: NameTable = {
    **bert_names("electra."),
    **parameter_names("electra.", "encoder.embedding.", {"embeddings_project": "projection"}),
    **parameter_names("generator_predictions.", "head.transform.", {"dense": "dense", "LayerNorm": "norm"}),
    "generator_lm_head.bias": "head.bias",
    **{
        f"{module}.{leaf}": _classifier_rule(f"{own}.{leaf}", reads, has_dense)
        for module, (own, reads, has_dense) in _CLASSIFIERS.items()
        for leaf in LEAVES
    },
}
FAMILY = Family(
    name="electra",
    presets=PRESETS,
    model_types=("electra",),
    read_config=read_config,
    write_config=write_config,
    tensor_names=NAMES,
    base_model_prefix="electra.",
    legacy_suffixes=LEGACY_SUFFIXES,
    duplicates={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    ignored_tensors=IGNORED_TENSORS,
    adjust_config=adjust_config,
)
