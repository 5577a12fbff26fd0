"""What a family of models brings: its released sizes, its config in transformers' words, its tensor names.

config = family.read(Settings(json_data, "config.json")); json_data = family.write(config)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from clearhead.architecture import Dropout, GroupedAttention, ModelConfig, NormalInitial, Stack
from clearhead.errors import ClearheadError, unknown_name
from clearhead.families.names import Table
from clearhead.families.settings import Settings

Part = TypeVar("Part")


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
    dropped: tuple[str, ...] = ()  # patterns of tensors left out on purpose, each with its reason beside it
    settle: Callable[[ModelConfig, set[str]], ModelConfig] = as_it_is  # what only the tensors can tell


# --- what several families ask when they read and write


def chosen(kinds: Mapping[str, Part], name: Any, settings: Settings) -> Part:
    """What an entry of `layer_types` means."""
    if not isinstance(name, str) or name not in kinds:
        raise unknown_name(f"layer type in {settings.where}:", str(name), kinds)
    return kinds[name]


def narrow(kind: type[Part], part: object) -> Part:
    """`part`, which this family has as `kind` only."""
    if not isinstance(part, kind):
        raise ClearheadError(f"this family has {kind.__name__} where the config has {type(part).__name__}")
    return part


def grouped_of(stack: Stack) -> list[GroupedAttention]:
    """The attention of each layer."""
    return [narrow(GroupedAttention, layer.attention) for layer in stack.layers]
