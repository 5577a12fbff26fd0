"""Parts shared by the encoder families: the heads of their classes, and BERT's names of tensors.

    config = add_heads(config, CLASSES, settings); data = write_heads(config, CLASSES)

The class that config.json names decides about heads and pooler. Where the stored tensors say otherwise, they are right:
the released bert-base-uncased names a class without pooler, but has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clearhead.architecture import Classifier, Head, ModelConfig
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import Copy, NameTable, TensorRule

_LANGUAGE, _SEQUENCE, _TOKENS, _PRETRAINING = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForPreTraining",
)


@dataclass(frozen=True, kw_only=True)
class EncoderClasses:
    """The heads of the classes of one family, and how to recognize them in a checkpoint."""

    name: str  # start of the names of the classes, such as "Bert"
    language: Head  # of ForMaskedLM
    # of ForSequenceClassification and ForTokenClassification; the number of labels is replaced by that of config.json
    sequence: Classifier
    tokens: Classifier = Classifier(num_labels=1, reads="tokens")
    pretraining: Classifier | None = None  # of ForPreTraining, beside the language head if `pretrains_language`
    pretrains_language: bool = True
    poolers: tuple[str, ...] = ()  # ends of the names of the classes that have a pooler
    language_tensors: str = "lm_head."  # start of the names of the language head's tensors
    pretraining_tensors: str = "-"


def number_of_labels(settings: Settings) -> int:
    """Return the number of labels of a classification head; 2 if config.json does not say, as in transformers."""
    if "id2label" in settings:
        return len(settings.object("id2label").data)
    return settings.integer("num_labels", 2, at_least=1)


def label_settings(num_labels: int) -> dict[str, Any]:
    """Return the settings of labels without names; those of the model replace them when it is saved."""
    names = [f"LABEL_{number}" for number in range(num_labels)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def add_heads(config: ModelConfig, classes: EncoderClasses, settings: Settings) -> ModelConfig:
    """Return the config with the heads and the pooler of the class that config.json names.

    transformers takes `add_pooling_layer` as a constructor argument and does not save it; `write_heads` does.
    """
    architectures = settings.array("architectures")
    name = next((name for name in architectures if isinstance(name, str)), f"{classes.name}Model")
    suffix = name.removeprefix(classes.name)
    classifier, has_language_head = None, suffix == _LANGUAGE
    if suffix in (_SEQUENCE, _TOKENS):
        template = classes.sequence if suffix == _SEQUENCE else classes.tokens
        classifier = replace(template, num_labels=number_of_labels(settings))
    elif suffix == _PRETRAINING and classes.pretraining is not None:
        classifier, has_language_head = classes.pretraining, classes.pretrains_language
    has_pooler = settings.boolean("add_pooling_layer", suffix in classes.poolers)
    return replace(
        config,
        head=classes.language if has_language_head else None,
        classifier=classifier,
        pooler=has_pooler or (classifier is not None and classifier.reads == "pooled"),
    )


def adjust_heads(config: ModelConfig, classes: EncoderClasses, tensor_names: set[str]) -> ModelConfig:
    """Give the config a language head, a pooler and a pretraining head if the checkpoint has them."""
    has_head = any(name.startswith(classes.language_tensors) for name in tensor_names)
    has_pooler = any(name.endswith(("pooler.dense.weight", "pooler.weight")) for name in tensor_names)
    classifier = config.classifier
    if any(name.startswith(classes.pretraining_tensors) for name in tensor_names):
        classifier = classes.pretraining
    elif _has_pretraining_head(config, classes):
        classifier = None
    if classes.poolers == ():
        has_pooler = False
    return replace(config, head=classes.language if has_head else None, pooler=has_pooler, classifier=classifier)


def _has_pretraining_head(config: ModelConfig, classes: EncoderClasses) -> bool:
    """Return whether a classifier is that of ForPreTraining; one of two labels without the language head is not."""
    return config.classifier == classes.pretraining and (config.head is not None) == classes.pretrains_language


def write_heads(config: ModelConfig, classes: EncoderClasses) -> dict[str, Any]:
    """Return the settings that say which heads and whether a pooler follow the encoder."""
    classifier = config.classifier
    if classifier is None:
        suffix = _LANGUAGE if config.head else "Model"
    elif _has_pretraining_head(config, classes):
        suffix = _PRETRAINING
    else:
        suffix = _TOKENS if classifier.reads == "tokens" else _SEQUENCE
    data: dict[str, Any] = {"architectures": [classes.name + suffix]}
    if classes.poolers:
        data["add_pooling_layer"] = config.pooler
    if classifier is not None and suffix != _PRETRAINING:
        data |= label_settings(classifier.num_labels)
    return data


def require_encoder(settings: Settings) -> None:
    """Raise ClearheadError if config.json describes a decoder, or another form of positions than the family has."""
    settings.allow_only("position_embedding_type", "absolute")
    settings.allow_only("is_decoder", False)
    settings.allow_only("add_cross_attention", False)
    settings.allow_only("tie_word_embeddings", True)


# --- tensor names

LEAVES = ("weight", "bias")
ENCODER_LAYER = "encoder.layers.{layer}"
_EMBEDDING_PARTS = {
    "word_embeddings.weight": "tokens.weight",
    "position_embeddings.weight": "positions.weight",
    "token_type_embeddings.weight": "types.weight",
    "LayerNorm.weight": "norm.weight",
    "LayerNorm.bias": "norm.bias",
}
_LAYER_PARTS = {
    "attention.self.query": "attention.query",
    "attention.self.key": "attention.key",
    "attention.self.value": "attention.value",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_residual.norm",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
    "output.LayerNorm": "feed_forward_residual.norm",
}


def parameter_names(theirs: str, ours: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the weight and bias of each part: those of a checkpoint to ours."""
    return {f"{theirs}{part}.{leaf}": f"{ours}{own}.{leaf}" for part, own in parts.items() for leaf in LEAVES}


def embedding_names(prefix: str) -> dict[str, str]:
    """Return the names of BERT's embeddings."""
    return {f"{prefix}embeddings.{part}": f"encoder.embedding.{own}" for part, own in _EMBEDDING_PARTS.items()}


def bert_names(prefix: str) -> NameTable:
    """Return the names of an encoder like BERT whose names start with `prefix`, such as "bert."."""
    return {
        **embedding_names(prefix),
        **parameter_names(f"{prefix}encoder.layer.{{layer}}.", f"{ENCODER_LAYER}.", _LAYER_PARTS),
        **parameter_names(prefix, "", {"pooler.dense": "pooler"}),
    }


def classifier_names(dense: str, output: str) -> NameTable:
    """Return the names of a classification head that has a dense layer for texts, but none for tokens."""
    names: dict[str, str | TensorRule] = {**parameter_names("", "", {dense: "classifier.transform.dense"})}
    marker = "classifier.transform.dense.weight"
    for leaf in LEAVES:
        scores = (f"classifier.scores.{leaf}",)
        names[f"classifier.{leaf}"] = Copy(scores, only_without=None if output == "classifier" else marker)
        if output != "classifier":
            names[f"{output}.{leaf}"] = Copy(scores, only_with=marker)
    return names


LEGACY_SUFFIXES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}  # TensorFlow's names
IGNORED_TENSORS = (r".*\.position_ids",)  # 0, 1, 2, …
