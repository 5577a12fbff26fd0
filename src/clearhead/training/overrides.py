"""Merge the tables of a recipe, and read values from the command line or from keyword arguments.

table = merge_tables(recipe_table, parse_overrides(["--train.steps", "100"]))
"""

import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from clearhead.config import MAX_NESTING, check_nesting
from clearhead.errors import ClearheadError, require


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
                f"unknown option {argument!r}; to change a value of the recipe, give its whole name, as in "
                "--train.steps 100; `clearhead train RECIPE --help` lists all"
            )
        if not equals:
            has_value = remaining and not remaining[0].startswith("--")
            text = remaining.pop(0) if has_value else "true"
        overrides.append((name, text))
    table: dict[str, Any] = {}
    # Outer tables come first, and in each table its kind, because a table of another kind replaces the previous one.
    for name, text in sorted(overrides, key=lambda pair: (pair[0].count("."), not pair[0].endswith(".kind"))):
        value: Any = _parse_value(text)
        table = merge_tables(table, _nest(name, value))
    return table


def _nest(name: str, value: Any) -> dict[str, Any]:
    """Return {"train": {"steps": 100}} for "train.steps" and 100."""
    parts = name.split(".")
    require(len(parts) <= MAX_NESTING, f"{name[:40]!r}… has {len(parts)} parts, more than any setting has")
    for part in reversed(parts):
        value = {part: value}
    return value


def _parse_value(text: str) -> Any:
    """Parse a TOML value. Return the text itself if it is not one, so that strings need no quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    check_nesting([value], f"the value {text[:20]}…")
    # No setting is a date, but the name of a folder may look like one.
    return text if isinstance(value, date | time) else value


def expand_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"train": {"steps": 100}, "data.path": Path("x")} as a nested table of plain values."""
    check_nesting(keywords, "the table of changes")
    table: dict[str, Any] = {}
    for name, value in keywords.items():
        value = expand_keywords(value) if isinstance(value, Mapping) else value
        value = str(value) if isinstance(value, Path) else value
        table = merge_tables(table, _nest(name, value))
    return table
