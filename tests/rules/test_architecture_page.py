"""docs/architecture.md agrees with the code: its layers, its table of imports and its call paths."""

import re

import pytest

from tests.rules.source import FILES, ROOT, top_level
from tests.rules.test_architecture import MAX_CALL_PATH
from tests.rules.test_packages import ALLOWED_IMPORTS, BASICS
from tests.rules.test_readme import PAGES
from tests.rules.test_readme import ROOT as REPOSITORY

PAGE = PAGES[REPOSITORY / "docs" / "architecture.md"]
LAYERS = {name: int(layer) for layer, name in re.findall(r"^(\d+) +(\w+) ", PAGE.split("```")[1], re.MULTILINE)}


def section(title: str) -> str:
    """Return the text below a heading, up to the next one."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_import_table_equals_the_allowed_imports():
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) \|$", section("What may import what"), re.MULTILINE)[1:]
    table = {name: set(imports.split(", ")) - {"nothing"} for name, imports in rows}
    assert table == {name: allowed for name, allowed in ALLOWED_IMPORTS.items() if name not in BASICS}


def test_every_package_has_a_layer():
    assert LAYERS.keys() == {top_level(path) for path in FILES if not top_level(path).startswith("__")}


@pytest.mark.parametrize("name", sorted(ALLOWED_IMPORTS.keys() - BASICS))
def test_packages_import_only_from_layers_below(name):
    assert all(LAYERS[imported] < LAYERS[name] for imported in ALLOWED_IMPORTS[name] | BASICS)


@pytest.mark.parametrize("title", ["The call path of a decode step", "The call path of a training step"])
def test_a_call_path_has_at_most_eight_files(title):
    files = re.findall(r"^\| \d \| `([\w/]+\.py)` \|", section(title), re.MULTILINE)
    assert 1 < len(files) <= MAX_CALL_PATH
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_functions_of_the_call_paths_exist():
    source = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    for title in ("The call path of a decode step", "The call path of a training step"):
        names = re.findall(r"`(?:[A-Z]\w+\.|model\.)?([a-z_]+)`", section(title))
        assert [name for name in names if not re.search(rf"def {name}\(", source)] == []
