"""Recipes: TOML, what the command line changes, and where each value comes from."""

from itertools import permutations
from pathlib import Path

import pytest

from clearhead.config import to_dict, to_toml
from clearhead.errors import ClearheadError
from clearhead.training.optimizer import AdamW
from clearhead.training.recipe import overlaid, parsed, read_recipe, resolve
from clearhead.training.schedule import Noam
from clearhead.training.start import check_same
from tests.training.recipes import LANGUAGE, SMALL

CONFIGS = Path(__file__).parents[2] / "configs"


def test_arguments_become_a_table():
    found = parsed(["--train.steps", "100", "--train.compile", "--model.name=gpt2", "--train.samples", '["a", "b"]'])
    assert found == {
        "train": {"steps": 100, "compile": True, "samples": ["a", "b"]},
        "model": {"name": "gpt2"},
    }


def test_what_looks_like_a_day_is_a_name():
    assert parsed(["--data.path", "2026-05-01"]) == {"data": {"path": "2026-05-01"}}


def test_the_order_of_arguments_does_not_matter():
    arguments = ["--data.train.kind=pair_table", "--data.kind=pair_data", "--data.context=8", "--data.train.path=x"]
    whole = {"data": {"kind": "pair_data", "context": 8, "train": {"kind": "pair_table", "path": "x"}}}
    assert all(parsed(order) == whole for order in permutations(arguments))
    assert parsed(["--train.steps", "1", "--train.steps", "2"]) == {"train": {"steps": 2}}  # the last one counts


@pytest.mark.parametrize("argument", ["steps", "--steps", "-x.y"])
def test_an_argument_that_is_none(argument):
    with pytest.raises(ClearheadError, match="is no option"):
        parsed([argument])


def test_tables_are_merged_unless_they_are_of_another_kind():
    old = {"model": {"kind": "a", "width": 1, "depth": 2}, "train": {"steps": 3}}
    assert overlaid(old, {"model": {"width": 5}})["model"] == {"kind": "a", "width": 5, "depth": 2}
    assert overlaid(old, {"model": {"kind": "b", "name": "x"}})["model"] == {"kind": "b", "name": "x"}
    assert overlaid(old, {"train": {"steps": 4}})["model"] is old["model"]


def test_the_origin_of_each_value_is_told():
    resolved = resolve([("recipe", SMALL), ("command line", {"train": {"steps": 7}})])
    assert resolved.recipe.train.steps == 7
    assert resolved.origins["train.steps"] == "command line"
    assert resolved.origins["train.batch_size"] == "recipe"
    assert resolved.origins["train.seed"] == "default"
    other = {"data": {"kind": "synthetic_data", "task": "sort"}}
    replaced = resolve([("recipe", SMALL | {"data": {"kind": "text_data", "context": 8}}), ("smoke", other)])
    assert replaced.origins["data.context"] == "default"
    assert any(line.split() == ["train.steps", "7", "(command", "line)"] for line in resolved.lines())


def test_what_is_left_to_its_default_needs_no_kind_to_be_changed():
    resolved = resolve([("recipe", SMALL), ("command line", parsed(["--train.optimizer.beta2", "0.98"]))])
    assert resolved.recipe.train.optimizer == AdamW(beta2=0.98)
    assert resolved.origins["train.optimizer.kind"] == "default"
    assert (
        resolve([("recipe", SMALL), ("x", {"train": {"schedule": {"kind": "noam"}}})]).recipe.train.schedule == Noam()
    )


def test_small_is_only_what_says_how(tmp_path):
    (tmp_path / "x.toml").write_text(to_toml(resolve([("recipe", SMALL)]).recipe))
    with pytest.raises(ClearheadError, match=r"x\.toml has no \[smoke\]"):
        read_recipe(tmp_path / "x.toml", smoke=True)


def test_as_windows_writes_it(tmp_path):
    recipe = resolve([("recipe", SMALL)]).recipe
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + to_toml(recipe).replace("\n", "\r\n").encode())
    assert read_recipe(tmp_path / "x.toml").recipe == recipe


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_whole(path):
    small, whole = read_recipe(path, smoke=True), read_recipe(path)
    assert small.recipe.train.steps <= 20 < whole.recipe.train.steps
    assert "smoke" in small.origins.values()
    assert "smoke" not in whole.origins.values()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model = 3", "recipe.model needs a kind"),
        ("[train", "is not valid TOML"),
        ("smoke = 1", "smoke must be a table"),
        ("[trian]", "unknown key in recipe: 'trian'; did you mean 'train'"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, sentence):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ClearheadError, match=sentence):
        read_recipe(tmp_path / "x.toml")


def test_a_new_model_needs_a_tokenizer():
    layers = [("recipe", SMALL | {"tokenizer": None}), ("change", LANGUAGE)]
    with pytest.raises(ClearheadError, match=r"needs a \[tokenizer\]"):
        resolve([*layers, ("path", {"data": {"path": "x"}})])


def test_of_another_recipe_the_kind_is_told_first(tmp_path):
    """Not the first of all its values in the alphabet."""
    old, new = (to_dict(read_recipe(name).recipe) for name in ("shakespeare-cpu", "capitals"))
    with pytest.raises(ClearheadError, match=r"began with data\.kind 'text_data', the recipe now says 'syn"):
        check_same(old, new, tmp_path)
