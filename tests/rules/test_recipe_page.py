"""docs/training.md lists the kinds that a recipe allows in each table."""

import re
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from clearhead.config import kind_of
from clearhead.data.config import TextData
from clearhead.training.config import TrainConfig
from clearhead.training.recipe import Recipe
from tests.rules.test_readme import PAGES, ROOT


def kinds(owner: type, field: str) -> list[str]:
    """Return the kinds of the dataclasses that a field allows."""
    hint: Any = get_type_hints(owner)[field]
    return [kind_of(choice) for choice in get_args(hint) if is_dataclass(choice)]


def test_the_page_lists_all_kinds():
    page = PAGES[ROOT / "docs" / "training.md"]
    rows = re.findall(r"^\| `\[([\w.]+)\]` \| (.+) \|$", page, re.MULTILINE)
    documented = {table: re.findall(r"`(\w+)`", cell.partition(" (")[0]) for table, cell in rows}
    assert documented == {
        "model": kinds(Recipe, "model"),
        "tokenizer": kinds(Recipe, "tokenizer"),
        "data": kinds(Recipe, "data"),
        "data.objective": kinds(TextData, "objective"),
        "train.optimizer": kinds(TrainConfig, "optimizer"),
        "train.schedule": kinds(TrainConfig, "schedule"),
        "train.balance": kinds(TrainConfig, "balance"),
    }
