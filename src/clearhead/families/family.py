"""What a family of models brings: its released sizes, its config in transformers' words, its tensor names.

family.read(Settings(json_data, "config.json")) -> ModelConfig; family.write(config) -> config.json data
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.families.names import Table
from clearhead.families.settings import Settings
from clearhead.model.config import Dropout, ModelConfig, NormalInitial


def said_whole(data: dict[str, Any], config: ModelConfig, read: Callable[[Settings], ModelConfig]) -> dict[str, Any]:
    """`data`, if reading it gives back the config; dropout and initial weights are matters of training, not written."""
    kind = data["model_type"]
    if read(Settings(data, kind)) != replace(config, dropout=Dropout(), initial=NormalInitial()):
        raise ClearheadError(f"a config.json of type {kind!r} cannot say all of this configuration")
    return data


def as_it_is(config: ModelConfig, tensor_names: set[str]) -> ModelConfig:
    return config


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    presets: Mapping[str, Callable[[], ModelConfig]]
    model_types: tuple[str, ...] = ()  # of transformers; none: no released Hugging Face form
    read: Callable[[Settings], ModelConfig] | None = None
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    names: Table = field(default_factory=dict)
    prefix: str = ""  # leading part of all names that checkpoints of the bare model leave out
    older_endings: Mapping[str, str] = field(default_factory=dict)  # of names in older checkpoints -> those of today
    copies: Mapping[str, str] = field(default_factory=dict)  # foreign name -> the one it repeats where tied
    dropped: tuple[str, ...] = ()  # patterns of tensors left out on purpose, each with its reason in the table
    settle: Callable[[ModelConfig, set[str]], ModelConfig] = as_it_is  # what only the tensors can tell
