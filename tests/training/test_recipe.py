"""Test reading recipes: TOML, overrides of the command line, and the origin of each value."""

from itertools import permutations
from pathlib import Path

import pytest

from clearhead.config import to_dict, to_toml
from clearhead.errors import ClearheadError
from clearhead.training.optimizer import AdamW
from clearhead.training.recipe import merge_tables, parse_overrides, read_recipe, resolve_recipe
from clearhead.training.schedule import Noam
from clearhead.training.start import check_same_recipe
from tests.training.recipes import LANGUAGE_MODEL, SMALL

CONFIGS = Path(__file__).parents[2] / "configs"


def test_parse_overrides_builds_a_table():
    table = parse_overrides(
        ["--train.steps", "100", "--train.compile", "--model.name=gpt2", "--train.samples", '["a", "b"]']
    )
    assert table == {
        "train": {"steps": 100, "compile": True, "samples": ["a", "b"]},
        "model": {"name": "gpt2"},
    }


def test_a_value_that_looks_like_a_date_is_a_string():
    assert parse_overrides(["--data.path", "2026-05-01"]) == {"data": {"path": "2026-05-01"}}


def test_the_order_of_overrides_does_not_matter():
    arguments = ["--data.train.kind=pair_table", "--data.kind=pair_data", "--data.context=8", "--data.train.path=x"]
    table = {"data": {"kind": "pair_data", "context": 8, "train": {"kind": "pair_table", "path": "x"}}}
    assert all(parse_overrides(order) == table for order in permutations(arguments))
    assert parse_overrides(["--train.steps", "1", "--train.steps", "2"]) == {
        "train": {"steps": 2}
    }  # the last one counts


@pytest.mark.parametrize("argument", ["steps", "--steps", "-x.y"])
def test_an_argument_that_is_not_an_override_is_rejected(argument):
    with pytest.raises(ClearheadError, match=r"unknown option .*as in --train\.steps 100"):
        parse_overrides([argument])


def test_merge_tables_replaces_tables_of_another_kind():
    old = {"model": {"kind": "a", "width": 1, "depth": 2}, "train": {"steps": 3}}
    assert merge_tables(old, {"model": {"width": 5}})["model"] == {"kind": "a", "width": 5, "depth": 2}
    assert merge_tables(old, {"model": {"kind": "b", "name": "x"}})["model"] == {"kind": "b", "name": "x"}
    assert merge_tables(old, {"train": {"steps": 4}})["model"] is old["model"]


def test_resolve_recipe_records_the_origin_of_each_value():
    resolved = resolve_recipe([("recipe", SMALL), ("command line", {"train": {"steps": 7}})])
    assert resolved.recipe.train.steps == 7
    assert resolved.origins["train.steps"] == "command line"
    assert resolved.origins["train.batch_size"] == "recipe"
    assert resolved.origins["train.seed"] == "default"
    other = {"data": {"kind": "synthetic_data", "task": "sort"}}
    replaced = resolve_recipe([("recipe", SMALL | {"data": {"kind": "text_data", "context": 8}}), ("smoke", other)])
    assert replaced.origins["data.context"] == "default"
    assert any(line.split() == ["train.steps", "7", "(command", "line)"] for line in resolved.describe())


def test_a_default_can_be_overridden_without_its_kind():
    resolved = resolve_recipe(
        [("recipe", SMALL), ("command line", parse_overrides(["--train.optimizer.beta2", "0.98"]))]
    )
    assert resolved.recipe.train.optimizer == AdamW(beta2=0.98)
    assert resolved.origins["train.optimizer.kind"] == "default"
    assert (
        resolve_recipe([("recipe", SMALL), ("x", {"train": {"schedule": {"kind": "noam"}}})]).recipe.train.schedule
        == Noam()
    )


def test_smoke_needs_a_smoke_table(tmp_path):
    (tmp_path / "x.toml").write_text(to_toml(resolve_recipe([("recipe", SMALL)]).recipe))
    with pytest.raises(ClearheadError, match=r"x\.toml has no \[smoke\]"):
        read_recipe(tmp_path / "x.toml", smoke=True)


def test_a_file_with_byte_order_mark_and_crlf_is_read(tmp_path):
    recipe = resolve_recipe([("recipe", SMALL)]).recipe
    (tmp_path / "x.toml").write_bytes(b"\xef\xbb\xbf" + to_toml(recipe).replace("\n", "\r\n").encode())
    assert read_recipe(tmp_path / "x.toml").recipe == recipe


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_in_configs_is_valid(path):
    smoke, full = read_recipe(path, smoke=True), read_recipe(path)
    assert smoke.recipe.train.steps <= 20 < full.recipe.train.steps
    assert "smoke" in smoke.origins.values()
    assert "smoke" not in full.origins.values()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 3", "recipe.model needs a kind"),
        ("[train", "is not valid TOML"),
        ("smoke = 1", "smoke must be a table"),
        ("[trian]", "unknown key in recipe: 'trian'; did you mean 'train'"),
    ],
)
def test_an_invalid_recipe_file_is_rejected(tmp_path, text, message):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ClearheadError, match=message):
        read_recipe(tmp_path / "x.toml")


def test_a_new_model_needs_a_tokenizer():
    layers = [("recipe", SMALL | {"tokenizer": None}), ("change", LANGUAGE_MODEL)]
    with pytest.raises(ClearheadError, match=r"needs a \[tokenizer\]"):
        resolve_recipe([*layers, ("path", {"data": {"path": "x"}})])


def test_check_same_recipe_names_a_different_kind_first(tmp_path):
    """Another kind is more important than the first value in alphabetical order."""
    old, new = (to_dict(read_recipe(name).recipe) for name in ("shakespeare-cpu", "capitals"))
    with pytest.raises(ClearheadError, match=r"started with data\.kind 'text_data', but the recipe now has 'syn"):
        check_same_recipe(old, new, tmp_path)


@pytest.mark.parametrize(
    ("schedule", "scaled"),
    [
        ({"kind": "linear", "warmup_steps": 50}, {"warmup_steps": 5}),
        ({"kind": "constant", "warmup_steps": 200}, {"warmup_steps": 20}),
        (
            {"kind": "warmup_stable_decay", "warmup_steps": 20, "decay_steps": 100},
            {"warmup_steps": 2, "decay_steps": 10},
        ),
        ({"kind": "warmup_stable_decay", "warmup_steps": 80, "decay_steps": 1}, {"warmup_steps": 8, "decay_steps": 1}),
    ],
)
def test_fewer_steps_on_the_command_line_scale_a_longer_schedule(schedule, scaled):
    layers = [("recipe", SMALL), ("recipe", {"train": {"steps": 400, "schedule": schedule}})]
    resolved = resolve_recipe([*layers, ("command line", parse_overrides(["--train.steps", "40"]))])
    assert {name: getattr(resolved.recipe.train.schedule, name) for name in scaled} == scaled
    assert resolved.origins["train.schedule.warmup_steps"] == "scaled"
    old, new = schedule["warmup_steps"], scaled["warmup_steps"]
    assert resolved.scaled[0] == (
        f"train.schedule.warmup_steps is {new} instead of {old}, because train.steps is 40 instead of 400"
    )
    assert resolved.notes[-1].startswith("note: train.schedule")


def test_a_schedule_that_fits_or_that_the_user_set_is_not_scaled():
    recipe = (
        "recipe",
        {**SMALL, "train": {**SMALL["train"], "steps": 400, "schedule": {"kind": "linear", "warmup_steps": 30}}},
    )
    fits = resolve_recipe([recipe, ("command line", parse_overrides(["--train.steps", "40"]))])
    assert fits.recipe.train.schedule.warmup_steps == 30
    assert fits.scaled == ()
    with pytest.raises(ClearheadError, match=r"warmup_steps 50 is more than train\.steps 40"):
        resolve_recipe(
            [recipe, ("command line", parse_overrides(["--train.steps=40", "--train.schedule.warmup_steps=50"]))]
        )
    with pytest.raises(ClearheadError, match=r"recipe\.train\.steps is 'many'; it must be a whole number"):
        resolve_recipe([recipe, ("command line", parse_overrides(["--train.steps=many"]))])
