"""Read recipes: TOML files that describe a training run. The command line can override any value.

resolved = read_recipe("capitals", ["--train.steps", "100"]); train(resolved.recipe, Path("runs/x"))

[model]      a preset, a saved model, or the sizes of a new model (models.py)
[tokenizer]  characters, bytes, a vocabulary to learn, or a file; absent for a saved model
[data]       the data to train on (data/config.py)
[train]      optimizer, schedule, number of steps and so on (config.py)
[lora]       train low-rank adapters only (lora.py)
[smoke]      changes with which the run takes half a minute on a CPU and needs no data
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import date, time
from pathlib import Path
from typing import Any, Literal

from clearhead.config import CheckedConfig, from_dict, kind_of, to_dict
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
class LearnedTokenizer(CheckedConfig):
    """A vocabulary learned from the training data."""

    algorithm: Literal["bpe", "unigram", "wordpiece"] = "bpe"
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A folder or file of a saved tokenizer."""

    path: str


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a training run needs to know."""

    model: ModelChoice
    tokenizer: CharacterTokenizer | ByteTokenizer | LearnedTokenizer | TokenizerFile | None = None
    data: Data
    train: TrainConfig
    lora: Lora | None = None

    def __post_init__(self) -> None:
        loaded = isinstance(self.model, LoadedModel)
        require(
            loaded or self.tokenizer is not None,
            "a new model needs a [tokenizer]; the simplest has kind = 'byte_tokenizer'",
        )
        require(not loaded or self.tokenizer is None, "a loaded model has its own tokenizer; remove [tokenizer]")
        require(loaded or self.lora is None, "[lora] adapts trained weights; it needs a model of kind loaded_model")
        require(
            self.lora is None or self.train.strategy != "tp",
            "[lora] adapts complete matrices, but strategy 'tp' shards them; use strategy 'ddp' or 'fsdp'",
        )


# The kinds of defaults, so that an override need not repeat them: --train.optimizer.beta2 0.98.
_DEFAULT_KINDS = {
    "train": {
        item.name: {"kind": kind_of(type(item.default_factory()))}
        for item in fields(TrainConfig)
        if item.default_factory is not MISSING
    }
}


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe and the origin of each of its values."""

    recipe: Recipe
    origins: dict[str, str]  # dotted name -> recipe, smoke, command line or default

    def describe(self) -> list[str]:
        """Return a line for each value with its name and origin."""
        values = flatten(to_dict(self.recipe))
        width = max(map(len, values))
        return [f"{name:{width}}  {value!r}  ({self.origins[name]})" for name, value in values.items()]


def read_recipe(name: str | Path, overrides: Sequence[str] = (), smoke: bool = False) -> ResolvedRecipe:
    """Read a recipe by name or from a file.

    `overrides` are command-line arguments such as ["--train.steps", "100", "--train.compile"]. With `smoke`, the
    recipe's [smoke] table is applied first.
    """
    path = find_recipe(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"{path} is not valid TOML: {error}") from None
    smoke_table = table.pop("smoke", None)
    if not isinstance(smoke_table, dict | None):
        raise ClearheadError(f"smoke must be a table in {path}")
    if smoke and smoke_table is None:
        raise ClearheadError(f"{path} has no [smoke] table; run it without --smoke")
    smoke_layer = smoke_table if smoke and smoke_table else {}
    return resolve_recipe([("recipe", table), ("smoke", smoke_layer), ("command line", parse_overrides(overrides))])


def resolve_recipe(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> ResolvedRecipe:
    """Build a recipe from layers of tables, each with the name of its origin. Later layers override earlier ones."""
    table: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in (("default", _DEFAULT_KINDS), *layers):
        table = merge_tables(table, layer)
        names = flatten(table)  # without the values of a table that this layer replaced
        origins = {name: old for name, old in origins.items() if name in names} | dict.fromkeys(flatten(layer), origin)
    recipe = from_dict(Recipe, table)
    return ResolvedRecipe(recipe, {name: origins.get(name, "default") for name in flatten(to_dict(recipe))})


def merge_tables(table: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `table` overridden by `layer`. Tables of the same kind are merged; everything else is replaced."""
    merged = dict(table)
    for name, value in layer.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same_kind = value.get("kind", old.get("kind")) == old.get("kind")
            value = merge_tables(old, value) if same_kind else value
        merged[name] = value
    return merged


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table with dotted names: {"train": {"steps": 100}} -> {"train.steps": 100}."""
    values: dict[str, Any] = {}
    for name, value in table.items():
        is_table = isinstance(value, Mapping)
        values |= flatten(value, f"{prefix}{name}.") if is_table else {f"{prefix}{name}": value}
    return values


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ["--train.steps", "100", "--train.compile"] into {"train": {"steps": 100, "compile": True}}."""
    overrides: list[tuple[str, str]] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in name:
            raise ClearheadError(
                f"{argument!r} is not an option; to change a value of the recipe, write for example --train.steps 100"
            )
        if not equals:
            has_value = remaining and not remaining[0].startswith("--")
            text = remaining.pop(0) if has_value else "true"
        overrides.append((name, text))
    table: dict[str, Any] = {}
    # Outer tables come first, and in each table its kind, because a table of another kind replaces the previous one.
    for name, text in sorted(overrides, key=lambda pair: (pair[0].count("."), not pair[0].endswith(".kind"))):
        value: Any = _parse_value(text)
        for part in reversed(name.split(".")):
            value = {part: value}
        table = merge_tables(table, value)
    return table


def _parse_value(text: str) -> Any:
    """Parse a TOML value. Return the text itself if it is not one, so that strings need no quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return (
        text if isinstance(value, date | time) else value
    )  # no setting is a date, but the name of a folder may look like one
