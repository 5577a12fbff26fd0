"""Recipes by name, in a checkout and in a wheel."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import clearhead
from clearhead.errors import ClearheadError
from clearhead.training import recipe_catalog as shelf
from clearhead.training.recipe import read_recipe

PROJECT = Path(__file__).parents[2]
NAMES = {
    "books", "capitals", "finetune-lora", "g2p", "g2p-cpu", "gpt2-124m", "llama-1b", "multi30k-tiny",
    "shakespeare-char", "shakespeare-cpu",
}  # fmt: skip


def test_there_are_the_promised_recipes():
    assert shelf.shelf() == {name: PROJECT / "configs" / f"{name}.toml" for name in NAMES}


def test_a_wheel_carries_them_where_they_are_looked_for():
    wheel = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert [Path(clearhead.__file__).parents[1] / place for place in wheel["force-include"].values()] == [
        shelf.HOMES[0]
    ]
    assert list(wheel["force-include"]) == ["configs"]


def test_without_a_checkout_those_of_the_wheel_are_found(monkeypatch, tmp_path):
    (tmp_path / "mine.toml").write_text("# A recipe of mine.\n")
    monkeypatch.setattr(shelf, "HOMES", (tmp_path, tmp_path / "nowhere"))
    assert shelf.shelf() == {"mine": tmp_path / "mine.toml"}
    assert shelf.heading(shelf.find_recipe("mine")) == ["A recipe of mine."]


def test_by_name_and_by_path_it_is_the_same(monkeypatch):
    monkeypatch.chdir(PROJECT)
    assert read_recipe("capitals") == read_recipe("configs/capitals.toml")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("capitlas", "unknown recipe 'capitlas'; did you mean 'capitals'?"),
        ("poems", "unknown recipe 'poems'; known are: books, capitals"),
        ("other/capitals.toml", "no recipe 'other/capitals.toml'; `clearhead train --list` shows"),
        (".", r"unknown recipe '\.'"),
    ],
)
def test_what_is_no_recipe(name, sentence):
    with pytest.raises(ClearheadError, match=sentence.replace("?", r"\?")):
        read_recipe(name)


def test_they_are_listed_with_what_they_train():
    command = [sys.executable, "-m", "clearhead", "train", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {line for line in done.stdout.splitlines() if not line.startswith(" ")} == NAMES
    for name in NAMES:
        assert f"clearhead train {name} --out runs/" in done.stdout
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert {one["name"] for one in told} == NAMES
    assert all(f"clearhead train {one['name']} --out runs/" in " ".join(one["about"]) for one in told)


def test_the_pages_name_recipes_there_are():
    pages = (PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"), *(PROJECT / "benchmarks").glob("*.md"))
    named = {
        name for page in pages for name in re.findall(r"clearhead train (\w[\w./-]*)", page.read_text(encoding="utf-8"))
    }
    assert "capitals" in named
    assert named <= NAMES
