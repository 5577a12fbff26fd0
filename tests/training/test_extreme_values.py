"""Test that values and files which no run can use are rejected at once, with one sentence."""

import pytest

from clearhead.config import MAX_NESTING, from_json, from_toml
from clearhead.data import synthetic
from clearhead.data.config import SyntheticData
from clearhead.data.synthetic import make_examples
from clearhead.errors import ClearheadError
from clearhead.training.config import TrainConfig
from clearhead.training.models import DecoderModel, RecurrentModel, TranslatorModel, build_model_config
from clearhead.training.overrides import expand_keywords, parse_overrides
from clearhead.training.recipe import read_recipe
from clearhead.training.setup import _check_memory
from tests.training.recipes import run

DEEP = 1200


def nested_toml(depth):
    return {
        "tables": "[" + ".".join("a" * depth) + "]\n",
        "dotted keys": ".".join("a" * depth) + " = 1\n",
        "inline tables": "a = " + "{a = " * depth + "1" + "}" * depth + "\n",
        "lists": "a = " + "[" * depth + "]" * depth + "\n",
    }


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 300, DEEP])
@pytest.mark.parametrize("form", nested_toml(1))
def test_deeply_nested_toml_is_rejected(tmp_path, form, depth):
    text = nested_toml(depth)[form]
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(ClearheadError, match=r"nested|not valid TOML"):
        read_recipe(tmp_path / "deep.toml")
    with pytest.raises(ClearheadError, match=r"nested|not valid TOML"):
        from_toml(TrainConfig, text)


def test_deeply_nested_json_is_rejected():
    with pytest.raises(ClearheadError, match=r"nested|not valid JSON"):
        from_json(TrainConfig, '{"steps": ' + "[" * 300 + "]" * 300 + "}")


def test_deeply_nested_overrides_are_rejected():
    name = ".".join("a" * DEEP)
    with pytest.raises(ClearheadError, match=r"has 1200 parts, more than any setting"):
        parse_overrides([f"--{name}", "1"])
    with pytest.raises(ClearheadError, match=r"has 1200 parts, more than any setting"):
        expand_keywords({name: 1})
    with pytest.raises(ClearheadError, match="nested"):
        parse_overrides(["--train.samples", "[" * 100 + "]" * 100])
    table = {}
    for _ in range(DEEP):
        table = {"a": table}
    with pytest.raises(ClearheadError, match="nested"):
        expand_keywords(table)


def test_a_file_that_is_too_large_to_be_a_recipe_is_rejected(tmp_path):
    (tmp_path / "large.toml").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ClearheadError, match=r"is not a recipe: it has more than 1,048,576 bytes"):
        read_recipe(tmp_path / "large.toml")


@pytest.mark.parametrize(
    "build",
    [
        lambda number: DecoderModel(width=8, num_layers=number, num_heads=1, context=8),
        lambda number: TranslatorModel(width=8, num_layers=number, num_heads=1, context=8, feed_forward=8),
        lambda number: RecurrentModel(width=8, num_layers=number, context=8),
    ],
)
def test_a_million_layers_are_rejected(build):
    assert build(1000).num_layers == 1000
    with pytest.raises(ClearheadError, match=r"model\.num_layers is 1000000; it must be at most 1000"):
        build(10**6)


@pytest.mark.parametrize("width", [10**7, 3 * 10**8])
def test_a_model_that_exceeds_the_memory_is_rejected_before_it_is_built(width):
    config = build_model_config(DecoderModel(width=width, num_layers=1, num_heads=1, context=8), vocab_size=10)
    with pytest.raises(ClearheadError, match=r"GB, but this machine has|the model is too large"):
        _check_memory(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_examples": 10**9}, "data.num_examples is 1000000000; it must be at most 10000000"),
        ({"num_validation": 10**9}, "data.num_validation is 1000000000"),
        ({"max_length": 10**9}, "data.max_length is 1000000000; it must be at most 1000000"),
        ({"task": "addition", "max_length": 5000}, "data.max_length is 5000; it must be at most 4000"),
    ],
)
def test_generated_data_that_no_memory_holds_is_rejected(changes, message):
    with pytest.raises(ClearheadError, match=message):
        SyntheticData(**({"task": "copy"} | changes))


def test_a_task_without_held_out_sources_is_rejected_instead_of_searched_forever(monkeypatch):
    """Of the single letters only `o` is held out, so a task that never makes it would search forever."""
    assert {source for source, _ in make_examples("copy", 1, 1, num_examples=3, seed=0, held_out=True)} == {"o"}
    monkeypatch.setattr(synthetic, "TASKS", {"copy": lambda random, length: ("a", "a")})
    with pytest.raises(ClearheadError, match=r"raise data\.max_length"):
        list(make_examples("copy", 1, 1, num_examples=1, seed=0, held_out=True))


def test_a_batch_of_a_billion_rows_is_rejected(tmp_path):
    with pytest.raises(ClearheadError, match=r"train\.batch_size is 1000000000; it must be at most 1048576"):
        run(tmp_path, {"train": {"batch_size": 10**9}})
