"""A recipe: a TOML file that says what is trained on what, and how; any value can be changed on the command line.

resolved = read_recipe("capitals", ["--train.steps", "100"]); train(resolved.recipe, Path("runs/x"))

[model]      a preset, a model to go on with, or the sizes of a new one (models.py)
[tokenizer]  characters, bytes, a vocabulary to learn, or a file; none for a loaded model
[data]       what to read (data/config.py)
[train]      how (config.py)
[lora]       train low-rank additions only (lora.py)
[smoke]      what to change so that the whole of it runs in half a minute on a CPU
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import date, time
from pathlib import Path
from typing import Any, Literal

from clearhead.config import Checked, from_dict, kind_of, to_dict
from clearhead.data import Data
from clearhead.errors import ClearheadError, require
from clearhead.training.config import TrainConfig
from clearhead.training.lora import Lora
from clearhead.training.models import LoadedModel, ModelChoice
from clearhead.training.recipe_catalog import find_recipe


@dataclass(frozen=True, kw_only=True)
class CharacterTokenizer:
    """One token for each character of the data."""


@dataclass(frozen=True, kw_only=True)
class ByteTokenizer:
    """One token for each byte of UTF-8."""


@dataclass(frozen=True, kw_only=True)
class LearnedTokenizer(Checked):
    """A vocabulary learnt from the training data."""

    algorithm: Literal["bpe", "unigram", "wordpiece"] = "bpe"
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A folder or file that holds one."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    model: ModelChoice
    tokenizer: CharacterTokenizer | ByteTokenizer | LearnedTokenizer | TokenizerFile | None = None
    data: Data
    train: TrainConfig
    lora: Lora | None = None

    def __post_init__(self) -> None:
        loaded = isinstance(self.model, LoadedModel)
        require(loaded or self.tokenizer is not None, "a new model needs a [tokenizer]; try kind = 'byte_tokenizer'")
        require(not loaded or self.tokenizer is None, "a loaded model has its tokenizer; leave [tokenizer] out")
        require(loaded or self.lora is None, "[lora] adds to trained weights; it needs a model of kind loaded_model")
        require(
            self.lora is None or self.train.strategy != "tp",
            "[lora] adds to whole matrices, of which strategy 'tp' leaves a process a slice; take ddp or fsdp",
        )


# So that a value of what is left to its default can be changed without naming its kind: --train.optimizer.beta2 0.98.
DEFAULT_KINDS = {
    "train": {
        item.name: {"kind": kind_of(type(item.default_factory()))}
        for item in fields(TrainConfig)
        if item.default_factory is not MISSING
    }
}


@dataclass(frozen=True)
class Resolved:
    """A recipe and where each of its values comes from."""

    recipe: Recipe
    origins: dict[str, str]  # dotted name -> recipe, smoke, command line or default

    def lines(self) -> list[str]:
        values = flat(to_dict(self.recipe))
        width = max(map(len, values))
        return [f"{name:{width}}  {value!r}  ({self.origins[name]})" for name, value in values.items()]


def read_recipe(name: str | Path, overrides: Sequence[str] = (), smoke: bool = False) -> Resolved:
    """By name or from a file; `overrides` as the command line has them: ["--train.steps", "100", "--train.compile"]."""
    path = find_recipe(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"{path} is not valid TOML: {error}") from None
    small = table.pop("smoke", None)
    if not isinstance(small, dict | None):
        raise ClearheadError(f"{path}: smoke must be a table")
    if smoke and small is None:
        raise ClearheadError(f"{path} has no [smoke], which would say what to make small; leave --smoke out")
    chosen = small if smoke and small else {}
    return resolve([("recipe", table), ("smoke", chosen), ("command line", parsed(overrides))])


def resolve(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Resolved:
    """Tables over one another, each named by where it comes from."""
    whole: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in (("default", DEFAULT_KINDS), *layers):
        whole = overlaid(whole, layer)
        names = flat(whole)  # without those of a table that this layer replaced
        origins = {name: old for name, old in origins.items() if name in names} | dict.fromkeys(flat(layer), origin)
    recipe = from_dict(Recipe, whole)
    return Resolved(recipe, {name: origins.get(name, "default") for name in flat(to_dict(recipe))})


def overlaid(table: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged, all else is replaced; so is a table of another kind."""
    merged = dict(table)
    for name, value in layer.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same_kind = value.get("kind", old.get("kind")) == old.get("kind")
            value = overlaid(old, value) if same_kind else value
        merged[name] = value
    return merged


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"steps": 100}} -> {"train.steps": 100}."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        inner = isinstance(value, Mapping)
        values |= flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return values


def parsed(arguments: Sequence[str]) -> dict[str, Any]:
    """["--train.steps", "100", "--train.compile"] -> {"train": {"steps": 100, "compile": True}}."""
    given: list[tuple[str, str]] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            raise ClearheadError(f"{argument!r} is no option; a value of the recipe is changed by --train.steps 100")
        if not equals:
            has_value = waiting and not waiting[0].startswith("--")
            text = waiting.pop(0) if has_value else "true"
        given.append((name, text))
    table: dict[str, Any] = {}
    # Outer tables first, and of each its kind: one of another kind takes the place of what was there.
    for name, text in sorted(given, key=lambda pair: (pair[0].count("."), not pair[0].endswith(".kind"))):
        value: Any = toml_value(text)
        for part in reversed(name.split(".")):
            value = {part: value}
        table = overlaid(table, value)
    return table


def toml_value(text: str) -> Any:
    """As TOML reads it, otherwise the text itself: quotes may be left out."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, date | time) else value  # no value is a day, but a folder may be called by one
