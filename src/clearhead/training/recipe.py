"""Read recipes: TOML files that describe a training run. The command line can override any value.

resolved = read_recipe("capitals", ["--train.steps", "100"]); train(resolved.recipe, Path("runs/x"))

[model]      a preset, a saved model, or the sizes of a new model (models.py)
[tokenizer]  characters, bytes, a vocabulary to learn, or a file; absent for a saved model
[data]       the data to train on (data/config.py)
[train]      optimizer, schedule, number of steps and so on (config.py)
[lora]       train low-rank adapters only (lora.py)
[dpo]        settings of preference tuning (preference.py)
[smoke]      changes with which the run takes half a minute on a CPU and needs no data
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from clearhead.config import CheckedConfig, check_nesting, from_dict, kind_of, to_dict
from clearhead.data import Data, PreferenceData
from clearhead.errors import ClearheadError, require
from clearhead.training.config import TrainConfig
from clearhead.training.lora import Lora
from clearhead.training.models import LoadedModel, ModelChoice
from clearhead.training.overrides import expand_keywords, flatten, merge_tables, parse_overrides
from clearhead.training.preference import Dpo
from clearhead.training.recipe_catalog import find_recipe
from clearhead.training.schedule import scale_phases


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
    dpo: Dpo | None = None

    def __post_init__(self) -> None:
        loaded = isinstance(self.model, LoadedModel)
        _check_preferences(self.data, self.dpo, self.train)
        require(loaded or self.dpo is None, "[dpo] tunes trained weights; it needs a model of kind loaded_model")
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


def _check_preferences(data: Data, dpo: Dpo | None, train: TrainConfig) -> None:
    """Raise ClearheadError if only one of data and objective concerns preferences, or a setting does not fit them."""
    if isinstance(data, PreferenceData) != (dpo is not None):
        raise ClearheadError(
            "data of kind preference_data and a [dpo] table need each other; add or remove one of them"
        )
    if dpo is None:
        return
    unsupported = {
        "train.smoothing": train.smoothing > 0,
        "train.z_weight": train.z_weight > 0,
        "train.balance": train.balance is not None,
        "train.strategy 'tp'": train.strategy == "tp",
    }
    for name in (name for name, is_set in unsupported.items() if is_set):
        raise ClearheadError(f"{name} is not supported with [dpo]; remove it")


# The kinds of defaults, so that an override need not repeat them: --train.optimizer.beta2 0.98.
_DEFAULT_KINDS = {
    "train": {
        item.name: {"kind": kind_of(type(item.default_factory()))}
        for item in fields(TrainConfig)
        if item.default_factory is not MISSING
    }
}
_MAX_BYTES = 1 << 20
_CHANGES = ("smoke", "command line", "keyword")  # origins of values that replace those of the recipe


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe and the origin of each of its values."""

    recipe: Recipe
    origins: dict[str, str]  # dotted name -> recipe, smoke, command line, keyword, scaled or default
    scaled: tuple[str, ...] = ()  # sentences about values that were adapted to a smaller number of steps

    @property
    def notes(self) -> list[str]:
        """Lines about values that differ from the recipe: changed by the user, or scaled."""
        values = flatten(to_dict(self.recipe))
        changed = [f"{name} {values[name]!r}" for name, origin in self.origins.items() if origin in _CHANGES]
        return [*([f"changed  {', '.join(changed)}"] if changed else []), *(f"note: {text}" for text in self.scaled)]

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
    return resolve_recipe([*_read_layers(name, smoke), ("command line", parse_overrides(overrides))])


def _read_layers(name: str | Path, smoke: bool) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the tables of a recipe file and, if requested, its [smoke] table."""
    path = find_recipe(name)
    require(path.stat().st_size <= _MAX_BYTES, f"{path} is not a recipe: it has more than {_MAX_BYTES:,} bytes")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as error:
        raise ClearheadError(f"{path} is not valid TOML: {error}") from None
    check_nesting(table, str(path))
    smoke_table = table.pop("smoke", None)
    if not isinstance(smoke_table, dict | None):
        raise ClearheadError(f"smoke must be a table in {path}")
    if smoke and smoke_table is None:
        raise ClearheadError(f"{path} has no [smoke] table; run it without --smoke")
    return [("recipe", table), ("smoke", smoke_table if smoke and smoke_table else {})]


def resolve(
    recipe: "str | Path | Recipe | ResolvedRecipe", overrides: Mapping[str, Any], smoke: bool = False
) -> ResolvedRecipe:
    """Return a recipe, given in any form, with these values replaced: {"train": {"steps": 100}}."""
    if isinstance(recipe, str | Path):
        return resolve_recipe([*_read_layers(recipe, smoke), ("keyword", expand_keywords(overrides))])
    if smoke:
        raise ClearheadError("smoke applies the [smoke] table of a file; give the recipe's name or path")
    if isinstance(recipe, ResolvedRecipe):
        if not overrides:
            return recipe
        recipe = recipe.recipe
    return resolve_recipe([("recipe", to_dict(recipe)), ("keyword", expand_keywords(overrides))])


def resolve_recipe(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> ResolvedRecipe:
    """Build a recipe from layers of tables, each with the name of its origin. Later layers override earlier ones."""
    table: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in (("default", _DEFAULT_KINDS), *layers):
        table = merge_tables(table, layer)
        names = flatten(table)  # without the values of a table that this layer replaced
        origins = {name: old for name, old in origins.items() if name in names} | dict.fromkeys(flatten(layer), origin)
    table, scaled = _scale_schedule(table, layers, origins)
    recipe = from_dict(Recipe, table)
    origins |= dict.fromkeys(scaled, "scaled")
    origins = {name: origins.get(name, "default") for name in flatten(to_dict(recipe))}
    return ResolvedRecipe(recipe, origins, tuple(scaled.values()))


def _scale_schedule(
    table: dict[str, Any], layers: Sequence[tuple[str, Mapping[str, Any]]], origins: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Shorten warm-up and decay if a later layer than theirs lowers train.steps below their sum.

    Return the table, and a sentence for each value that was scaled. Invalid values stay, for `from_dict` to reject.
    """
    values = flatten(table)
    names = [f"train.schedule.{key}" for key in ("warmup_steps", "decay_steps")]
    phases = {name: values[name] for name in names if name in values}
    origin = {origins[name] for name in phases}
    if len(origin) != 1 or origin == {origins.get("train.steps")} or values.get("train.schedule.kind") == "noam":
        return table, {}
    before: Any = [flatten(layer).get("train.steps") for name, layer in layers if {name} == origin][-1]
    steps: Any = values.get("train.steps")
    if not all(type(number) is int and number >= 0 for number in (before, steps, *phases.values())):
        return table, {}
    sentences = {}
    for name, scaled in zip(phases, scale_phases([*phases.values()], before, steps), strict=False):
        table = merge_tables(table, expand_keywords({name: scaled}))
        sentences[name] = (
            f"{name} is {scaled} instead of {phases[name]}, because train.steps is {steps} instead of {before}"
        )
    return table, sentences
