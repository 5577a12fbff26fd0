"""Test finding recipes by name, in a checkout and in a wheel."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import clearhead
from clearhead.errors import ClearheadError
from clearhead.training import recipe_catalog
from clearhead.training.recipe import read_recipe
from tests.forked_command import run_forked

PROJECT = Path(__file__).parents[2]
NAMES = {
    "books", "capitals", "dpo", "finetune-lora", "g2p", "g2p-cpu", "gpt2-124m", "llama-1b", "multi30k-tiny",
    "shakespeare-char", "shakespeare-cpu",
}  # fmt: skip


def test_all_recipes_of_the_checkout_are_available():
    assert recipe_catalog.available_recipes() == {name: PROJECT / "configs" / f"{name}.toml" for name in NAMES}


def test_a_wheel_contains_the_recipes_in_the_first_folder():
    wheel = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert [Path(clearhead.__file__).parents[1] / folder for folder in wheel["force-include"].values()] == [
        recipe_catalog.RECIPE_FOLDERS[0]
    ]
    assert list(wheel["force-include"]) == ["configs"]


def test_recipes_of_a_wheel_are_found_without_a_checkout(monkeypatch, tmp_path):
    (tmp_path / "mine.toml").write_text("# A recipe of mine.\n")
    monkeypatch.setattr(recipe_catalog, "RECIPE_FOLDERS", (tmp_path, tmp_path / "nowhere"))
    assert recipe_catalog.available_recipes() == {"mine": tmp_path / "mine.toml"}
    assert recipe_catalog.describe_recipe(recipe_catalog.find_recipe("mine")) == ["A recipe of mine."]


def test_a_recipe_is_the_same_by_name_and_by_path(monkeypatch):
    monkeypatch.chdir(PROJECT)
    assert read_recipe("capitals") == read_recipe("configs/capitals.toml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("capitlas", "unknown recipe 'capitlas'; did you mean 'capitals'?"),
        ("poems", "unknown recipe 'poems'; available: books, capitals"),
        ("other/capitals.toml", "the recipe 'other/capitals.toml' does not exist; `clearhead train --list` shows"),
        (".", r"unknown recipe '\.'"),
    ],
)
def test_an_unknown_recipe_is_rejected(name, message):
    with pytest.raises(ClearheadError, match=message.replace("?", r"\?")):
        read_recipe(name)


def test_list_prints_every_recipe_with_its_command():
    done = run_forked("train", "--list")
    assert {line for line in done.stdout.splitlines() if not line.startswith(" ")} == NAMES
    for name in NAMES:
        assert f"clearhead train {name} --out runs/" in done.stdout
    listed = json.loads(run_forked("train", "--list", "--json").stdout)
    assert {entry["name"] for entry in listed} == NAMES
    assert all(f"clearhead train {entry['name']} --out runs/" in " ".join(entry["about"]) for entry in listed)


def test_the_documentation_names_only_existing_recipes():
    pages = (PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"), *(PROJECT / "benchmarks").glob("*.md"))
    names = {
        name for page in pages for name in re.findall(r"clearhead train (\w[\w./-]*)", page.read_text(encoding="utf-8"))
    }
    assert "capitals" in names
    assert names <= NAMES
