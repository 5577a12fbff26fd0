"""Heads that checkpoints of any decoder family can have instead of the language head, as transformers names them.

config = replace_head(family, config, settings, tensor_names); data = write_config(family, config)

A LlamaModel has no head: the network returns hidden states, to embed texts. LlamaForSequenceClassification computes the
scores of labels from the last token, LlamaForTokenClassification those of each token.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from clearhead.architecture import Classifier, Head, ModelConfig
from clearhead.errors import ClearheadError
from clearhead.families.encoder_style import label_settings, number_of_labels
from clearhead.families.family import Family
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import Copy, NameTable

_SEQUENCE, _TOKENS, _BARE = "ForSequenceClassification", "ForTokenClassification", "Model"
_LANGUAGE_CLASS = r"(ForCausalLM|LMHeadModel)$"
_CLASSIFIER_NAMES: NameTable = {
    f"score.{leaf}": Copy((f"classifier.scores.{leaf}",), only_with="decoder.embedding.tokens.weight")
    for leaf in ("weight", "bias")
}


def names_with_classifier(family: Family) -> NameTable:
    """Return the tensor names of a family, with those of the classifier unless it has names of its own."""
    has_own_names = "classifier.bias" in family.tensor_names
    return family.tensor_names if has_own_names else {**_CLASSIFIER_NAMES, **family.tensor_names}


def replace_head(family: Family, config: ModelConfig, settings: Settings, tensor_names: set[str] | None) -> ModelConfig:
    """Return the config with the head of the class that config.json names.

    A head of its own that is not stored is left out if the class is the bare model, or if the names of the tensors lack
    the prefix of a model with a head, as in embedding models whose config.json still names the class with a head.
    """
    if config.decoder is None or config.is_encoder_decoder:
        return config
    names = [name for name in settings.array("architectures") if isinstance(name, str)]
    for suffix in (_SEQUENCE, _TOKENS):
        if any(name.endswith(suffix) for name in names):
            reads: Any = "last" if suffix == _SEQUENCE else "tokens"
            num_labels = number_of_labels(settings)
            classifier = Classifier(num_labels=num_labels, reads=reads, bias=suffix == _TOKENS)
            return replace(config, head=None, classifier=classifier)
    if config.head is None or config.head.tied:
        return config
    is_bare_class = any(name.endswith(_BARE) and not re.search(_LANGUAGE_CLASS, name) for name in names)
    if tensor_names is None:
        return replace(config, head=None) if is_bare_class else config
    stored = {foreign for foreign, own in family.tensor_names.items() if own == "head.weight"}
    prefix = family.base_model_prefix
    has_prefix = not prefix or any(prefix in name for name in tensor_names)
    is_missing = not stored & tensor_names and (is_bare_class or not has_prefix)
    return replace(config, head=None) if is_missing else config


def write_config(family: Family, config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a config; raise ClearheadError if the family has no class for it."""
    if family.write_config is None:
        raise ClearheadError(f"the {family.name} family has no Hugging Face format; save it as native instead")
    if config.decoder is None or config.is_encoder_decoder or config.head is not None:
        return family.write_config(config)
    data = _write_with_a_head(family.write_config, replace(config, classifier=None))
    (name,) = data["architectures"]
    if not re.search(_LANGUAGE_CLASS, name):
        raise ClearheadError(f"the {family.name} family has no class without a head; save it as native instead")
    classifier = config.classifier
    suffix = _BARE if classifier is None else _TOKENS if classifier.reads == "tokens" else _SEQUENCE
    data["architectures"] = [re.sub(_LANGUAGE_CLASS, suffix, name)]
    return data | ({} if classifier is None else label_settings(classifier.num_labels))


def _write_with_a_head(write: Callable[[ModelConfig], dict[str, Any]], config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a config with a language head, which has a bias in some families."""
    try:
        return write(replace(config, head=Head(tied=False)))
    except ClearheadError:
        return write(replace(config, head=Head(tied=False, bias=True)))
