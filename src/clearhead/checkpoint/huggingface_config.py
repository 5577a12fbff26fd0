"""The config.json of a Hugging Face folder: to a config, special ids and a name table, and back.

    config = config_from(family, Settings(json_data, "config.json"), tensor_names=None)

A module of transformers in memory has the same settings, so both ways of loading share these functions.
"""

from typing import Any

from clearhead.architecture import ModelConfig
from clearhead.checkpoint.generation_rules import read_generation_ids
from clearhead.checkpoint.labels import Labels
from clearhead.checkpoint.placement import network_dtype
from clearhead.errors import require
from clearhead.families import (
    GENERATION_IDS,
    Family,
    NameTable,
    Settings,
    names_with_classifier,
    replace_head,
    write_config,
)
from clearhead.model import Transformer

# The number of heads in families that do not call it `num_attention_heads`
_NAMES_OF_NUM_HEADS = ("n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")


def language_settings_of(settings: Settings) -> Settings:
    """Return the settings of the language model: all of them, or `text_config` of a model that also reads images.

    `tie_word_embeddings` of the outer settings takes precedence, and `is_text_part` tells the families that the class
    is that of the whole model.
    """
    inner, tied = settings.object("text_config"), "tie_word_embeddings"
    if not inner.data:
        return settings
    outer = {tied: settings.data[tied]} if tied in settings else {}
    return Settings({**inner.data, **outer, "is_text_part": True}, inner.where)


def config_from(family: Family, settings: Settings, tensor_names: set[str] | None) -> ModelConfig:
    """Return the config that config.json describes, adjusted to the stored tensors if their names are known."""
    assert family.read_config is not None
    language_settings = language_settings_of(settings)
    _check_number_of_heads(language_settings)
    config = family.read_config(language_settings)
    require(  # transformers reads it in every class with a causal mask
        config.decoder is None or language_settings.truth("is_causal", True),
        f"{settings.where}: 'is_causal' is false or null, but a decoder is read with a causal mask only",
    )
    config = config if tensor_names is None else family.adjust_config(config, tensor_names)
    return replace_head(family, config, settings, tensor_names)


def _check_number_of_heads(settings: Settings) -> None:
    """Raise ClearheadError if `num_attention_heads` and the family's own name for it have different values.

    transformers uses `num_attention_heads`. Unlike other sizes, a wrong number of heads does not change tensor shapes.
    """
    for name in _NAMES_OF_NUM_HEADS:
        if name in settings:
            settings.allow_only("num_attention_heads", settings.data[name])


def name_table(family: Family) -> NameTable:
    """Return the names of a family's tensors, with those of the classification heads that transformers adds to it."""
    return names_with_classifier(family)


def merge_special_ids(settings: Settings, generation: Settings) -> dict[str, int | list[int]]:
    """Return the special ids of config.json and generation_config.json, of which the second takes precedence."""
    ids = language_settings_of(settings).special_ids() | settings.special_ids()
    if generation.data:
        ids = {name: value for name, value in ids.items() if name not in GENERATION_IDS}
    is_speech = "num_mel_bins" in settings
    return ids | read_generation_ids(generation if generation.data else settings, is_speech=is_speech)


def folder_config(
    network: Transformer, family: Family, special_ids: dict[str, Any] | None, labels: Labels | None
) -> dict[str, Any]:
    """Return the content of config.json."""
    written = write_config(family, network.config) | (labels.settings() if labels else {})
    # transformers replaces an absent id by the default of its class, which may lie outside the vocabulary.
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": family.padding_id}
    ids |= special_ids or {}
    dtype = str(network_dtype(network)).removeprefix("torch.")
    # Some families compute with the id of the padding token and write it themselves.
    return written | {"dtype": dtype} | {name: ids[name] for name in ids if name not in written}
