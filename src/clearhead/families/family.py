"""The Family class: what a family of models provides, and helpers for reading and writing its config.json.

config = family.read_config(Settings(json_data, "config.json")); json_data = family.write_config(config)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from clearhead.architecture import Dropout, GroupedAttention, ModelConfig, NormalInitial, Stack
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families.settings import Settings
from clearhead.families.tensor_rules import NameTable

Part = TypeVar("Part")
Preset = Callable[[], ModelConfig]  # builds the configuration of one released size


def _keep_config(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    """Return the config as it is: config.json alone determines it."""
    return config


@dataclass(frozen=True, kw_only=True)
class Family:
    """The released sizes of a family, and how its Hugging Face checkpoints correspond to our networks.

    A family without `model_types` has no Hugging Face form; its presets can still be built.
    """

    name: str
    presets: Mapping[str, Preset]
    model_types: tuple[str, ...] = ()  # the values of `model_type` in config.json that this family reads
    read_config: Callable[[Settings], ModelConfig] | None = None  # from config.json to our config
    write_config: Callable[[ModelConfig], dict[str, Any]] | None = None  # from our config to config.json
    tensor_names: NameTable = field(default_factory=dict)  # tensor names of checkpoints -> ours
    base_model_prefix: str = ""  # start of the names that a checkpoint without head leaves out, such as "model."
    legacy_suffixes: Mapping[str, str] = field(default_factory=dict)  # end of a name in old checkpoints -> end today
    duplicates: Mapping[str, str] = field(default_factory=dict)  # tensor that may repeat another -> that other one
    ignored_tensors: tuple[str, ...] = ()  # regular expressions of tensors that are not loaded, each with its reason
    padding_id: int | None = None  # what config.json says for a model without padding token
    adjust_config: Callable[[ModelConfig, set[str]], ModelConfig] = _keep_config  # to what the tensor names show


# --- helpers for read_config and write_config


def require_round_trip(
    data: dict[str, Any], config: ModelConfig, read_config: Callable[[Settings], ModelConfig]
) -> dict[str, Any]:
    """Return `data`; raise ClearheadError unless reading it gives back `config`.

    Dropout and initial weights concern training only and are not written, so they are not compared.
    """
    model_type = data["model_type"]
    if read_config(Settings(data, model_type)) != replace(config, dropout=Dropout(), initial=NormalInitial()):
        raise ClearheadError(f"a config.json of type {model_type!r} cannot express this configuration")
    return data


def look_up_layer_type(meanings: Mapping[str, Part], name: Any, settings: Settings) -> Part:
    """Return what an entry of `layer_types` means, or raise ClearheadError if it is unknown."""
    if not isinstance(name, str) or name not in meanings:
        raise unknown_name(f"layer type in {settings.where}:", str(name), meanings)
    return meanings[name]


def require_type(expected: type[Part], part: object) -> Part:
    """Return `part`; raise ClearheadError if it is not the one type that this family supports there."""
    if not isinstance(part, expected):
        raise ClearheadError(f"this family needs {expected.__name__} where the config has {type(part).__name__}")
    return part


def grouped_attentions(stack: Stack) -> list[GroupedAttention]:
    """Return the attention of each layer; raise ClearheadError if one is not grouped attention."""
    return [require_type(GroupedAttention, layer.attention) for layer in stack.layers]
