"""Configs survive JSON and TOML, tested with random ones, and every kind of invalid file has a clear error."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.architecture import Head, LayerNorm, LinearScaling, ModelConfig, Rope
from clearhead.config import MAX_LAYERS, MAX_NUMBER, from_dict, from_json, from_toml, kind_of, to_dict, to_json, to_toml
from clearhead.errors import ClearheadError
from clearhead.families import preset, presets
from tests.model.random_configs import CONFIGS, SLOW_SETTINGS
from tests.model.toys import decoder, grouped, translator

# --- random configs


@SLOW_SETTINGS
@given(CONFIGS)
def test_json_round_trip_of_random_configs(config):
    assert from_json(ModelConfig, to_json(config)) == config
    json.loads(to_json(config), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@SLOW_SETTINGS
@given(CONFIGS)
def test_toml_round_trip_of_random_configs(config):
    assert from_toml(ModelConfig, to_toml(config)) == config


@SLOW_SETTINGS
@given(CONFIGS, st.data())
def test_a_misspelt_key_is_reported_with_the_nearest_name(config, data):
    plain = to_dict(config)
    table, where = data.draw(st.sampled_from(list(tables(plain, "model_config"))))
    keys = [key for key in table if key not in ("kind", "times")]
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    table[f"{key}x"] = table.pop(key)
    with pytest.raises(ClearheadError) as caught:
        from_dict(ModelConfig, plain)
    assert str(caught.value).startswith(f"unknown key in {where}: '{key}x'; did you mean '{key}'?")


@given(st.floats(1, MAX_NUMBER, exclude_min=True))
def test_floats_round_trip_exactly(theta):
    assert from_json(Rope, to_json(Rope(theta=theta))).theta == theta
    assert from_toml(Rope, to_toml(Rope(theta=theta))).theta == theta


def tables(plain: Any, where: str) -> Any:
    """Yield every table inside plain data and its place as error messages name it."""
    if isinstance(plain, dict):
        yield plain, where
        for key, value in plain.items():
            yield from tables(value, f"{where}.{key}")
    elif isinstance(plain, list):
        for number, value in enumerate(plain):
            yield from tables(value, f"{where}[{number}]")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@SLOW_SETTINGS
@given(ANYTHING, st.data())
def test_an_arbitrary_value_anywhere_is_accepted_or_raises_a_one_line_error(anything, data):
    plain = to_dict(translator())
    table, _ = data.draw(st.sampled_from(list(tables(plain, ""))))
    table[data.draw(st.sampled_from(sorted(table)))] = anything
    result = outcome(plain)
    assert isinstance(result, ModelConfig) or "\n" not in result


def outcome(plain: Any) -> ModelConfig | str:
    try:
        return from_dict(ModelConfig, plain)
    except ClearheadError as error:
        return str(error)


@SLOW_SETTINGS
@given(st.text())
def test_an_arbitrary_text_raises_a_clearhead_error(text):
    for read in (from_json, from_toml):
        with pytest.raises(ClearheadError):
            read(ModelConfig, text)


# --- the written form


@pytest.mark.parametrize("name", presets())
def test_every_preset_round_trips_through_json_and_toml(name):
    config = preset(name)
    assert from_json(ModelConfig, to_json(config)) == config
    assert from_toml(ModelConfig, to_toml(config)) == config


def test_consecutive_equal_layers_are_written_once():
    plain = to_dict(preset("llama-3.1-405b"))
    assert [entry["times"] for entry in plain["decoder"]["layers"]] == [126]
    assert len(to_json(preset("llama-3.1-405b"))) < 2000
    assert "times" not in to_dict(preset("gpt3-125m"))["decoder"]["layers"][0]  # dense and banded layers alternate


def test_none_is_omitted_and_a_choice_is_written_with_its_kind():
    assert to_dict(Rope()) == {"theta": 10000.0, "pairing": "half"}
    assert to_dict(Rope(scaling=LinearScaling(factor=2.0)))["scaling"] == {"kind": "linear_scaling", "factor": 2.0}
    assert kind_of(type(grouped())) == "grouped_attention"
    assert "kind" not in to_dict(decoder())["decoder"]


def test_null_is_read_as_none():
    assert from_json(Rope, '{"width": null, "scaling": null}') == Rope()


def test_an_integer_is_read_as_a_float_for_a_float_field():
    rope = from_json(Rope, '{"theta": 500000}')
    assert rope == Rope(theta=500000.0)
    assert isinstance(rope.theta, float)


# --- invalid data

LAYERS = {"times": 2, "attention": {"kind": "grouped_attention", "num_heads": 2, "num_kv_heads": 1, "head_width": 4}}
INVALID = {
    "not a table": (Rope, [], "rope must be a table of named values, not []"),
    "unknown key": (Rope, {"thetta": 1.0}, "unknown key in rope: 'thetta'; did you mean 'theta'?"),
    "unknown key without a near name": (
        Head,
        {"zzz": 1},
        "unknown key in head: 'zzz'; available: bias, scale, softcap, tied, transform",
    ),
    "missing": (LayerNorm, {}, "layer_norm.epsilon is missing; add it"),
    "string for a float": (Rope, {"theta": "big"}, "rope.theta is 'big'; it must be a number"),
    "float for an int": (Rope, {"width": 4.0}, "rope.width is 4.0; it must be a whole number"),
    "bool for a float": (Rope, {"theta": True}, "rope.theta is True; it must be a number"),
    "bool for an int": (Rope, {"width": True}, "rope.width is True; it must be a whole number"),
    "int for a bool": (LayerNorm, {"epsilon": 1e-5, "bias": 1}, "layer_norm.bias is 1; it must be true or false"),
    "null for a float": (Rope, {"theta": None}, "rope.theta is None; it must be a number"),
    "infinite": (Rope, {"theta": float("inf")}, "rope.theta must be a finite number"),
    "not a number": (Rope, {"theta": float("nan")}, "rope.theta must be a finite number"),
    "too large for a float": (Rope, {"theta": 10**400}, "rope.theta must be a finite number"),
    "unknown literal": (Rope, {"pairing": "halve"}, "unknown rope.pairing: 'halve'; did you mean 'half'?"),
    "number for a literal": (Rope, {"pairing": 3}, "unknown rope.pairing: '3'; available: half, interleaved"),
    "list for a literal": (Rope, {"pairing": ["half"]}, "unknown rope.pairing: \"['half']\"; did you mean 'half'?"),
    "no kind": (
        Rope,
        {"scaling": {"factor": 2.0}},
        "rope.scaling needs a kind: one of dynamic_scaling, linear_scaling, llama3_scaling, long_rope_scaling",
    ),
    "number for a choice": (
        Rope,
        {"scaling": 2.0},
        "rope.scaling needs a kind: one of dynamic_scaling, linear_scaling",
    ),
    "kind that is a number": (Rope, {"scaling": {"kind": 7}}, "rope.scaling needs a kind: one of dynamic_scaling"),
    "unknown kind": (
        Rope,
        {"scaling": {"kind": "linear"}},
        "unknown rope.scaling.kind: 'linear'; did you mean 'linear_scaling'?",
    ),
    "key of another kind": (
        Rope,
        {"scaling": {"kind": "linear_scaling", "factor": 2.0, "beta_fast": 1.0}},
        "unknown key in rope.scaling: 'beta_fast'",
    ),
    "rejected by the dataclass": (Rope, {"theta": 0.5}, "rope.theta is 0.5"),
    "missing in a nested table": (
        ModelConfig,
        {"width": 4, "context": 4, "decoder": {"layers": []}},
        "model_config.decoder.embedding is missing; add it",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_data_has_a_clear_error(name):
    part, data, message = INVALID[name]
    with pytest.raises(ClearheadError) as caught:
        from_dict(part, data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def with_layers(layers: Any) -> dict[str, Any]:
    plain = to_dict(decoder())
    plain["decoder"]["layers"] = layers
    return plain


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("many", "model_config.decoder.layers must be a list, not 'many'"),
        ({"times": 2}, "model_config.decoder.layers must be a list, not {'times': 2}"),
        (7, "model_config.decoder.layers must be a list, not 7"),
        ([7], "model_config.decoder.layers[0] must be a table of named values, not 7"),
        (
            [LAYERS | {"times": 0}],
            f"model_config.decoder.layers[0].times is 0; it must be at least 1, and the list may have {MAX_LAYERS}",
        ),
        ([LAYERS | {"times": 10**9}], "model_config.decoder.layers[0].times is 1000000000; it must be at least 1"),
        ([LAYERS | {"times": "2"}], "model_config.decoder.layers[0].times is '2'; it must be a whole number"),
        ([LAYERS | {"times": 2.0}], "model_config.decoder.layers[0].times is 2.0; it must be a whole number"),
        ([LAYERS], "model_config.decoder.layers[0].feed_forward is missing; add it"),
        ([], "a stack needs at least one layer"),
    ],
)
def test_invalid_lists_of_layers_have_a_clear_error(layers, message):
    with pytest.raises(ClearheadError) as caught:
        from_dict(ModelConfig, with_layers(layers))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (from_json, "{", "the text is not valid JSON: Expecting property name"),
        (from_json, "", "the text is not valid JSON"),
        (from_json, "[" * 100_000, "the text is not valid JSON"),
        (from_json, '{"theta": ' + "9" * 5000 + "}", "the text is not valid JSON: Exceeds the limit"),
        (from_json, '{"theta": NaN}', "rope.theta must be a finite number"),
        (from_json, '{"theta": 1e999}', "rope.theta must be a finite number"),
        (from_toml, "theta = ", "the text is not valid TOML"),
        (from_toml, "theta = 1.0\ntheta = 2.0", "the text is not valid TOML: Cannot overwrite a value"),
        (from_toml, "theta = " + "9" * 5000, "the text is not valid TOML: Exceeds the limit"),
        (from_toml, "theta = inf", "rope.theta must be a finite number"),
        (from_toml, "theta = 1979-05-27", "rope.theta is datetime.date(1979, 5, 27); it must be a number"),
    ],
    ids=lambda value: value[:16] if isinstance(value, str) else None,
)
def test_invalid_texts_have_a_clear_error(read, text, message):
    with pytest.raises(ClearheadError) as caught:
        read(Rope, text)
    assert str(caught.value).startswith(message)


# --- other types of fields than model configs have


@dataclass(frozen=True, kw_only=True)
class Paper:
    title: str
    pages: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    note: str | None = None


@SLOW_SETTINGS
@given(
    st.builds(
        Paper,
        title=st.text(),
        pages=st.lists(st.integers(-(2**62), 2**62)).map(tuple),
        names=st.lists(st.text()).map(tuple),
        note=st.none() | st.text(),
    )
)
def test_any_string_in_a_field_round_trips_through_json_and_toml(paper):
    assert from_json(Paper, to_json(paper)) == paper
    assert from_toml(Paper, to_toml(paper)) == paper


def test_lists_without_times_may_be_longer_than_max_layers():
    @dataclass(frozen=True)
    class Names:
        names: tuple[str, ...]

    assert len(from_dict(Names, {"names": ["x"] * (MAX_LAYERS + 1)}).names) == MAX_LAYERS + 1


def test_an_integer_beyond_64_bits_is_rejected():
    with pytest.raises(ClearheadError, match="width is out of range; it must fit in 64 bits"):
        from_dict(ModelConfig, to_dict(decoder()) | {"width": 10**30})


def test_lists_of_plain_values_are_written_in_full():
    paper = Paper(title="", pages=(1, 1, 1, 2))
    assert to_dict(paper)["pages"] == [1, 1, 1, 2]
    with pytest.raises(ClearheadError, match=r"paper.pages\[1\] is 'two'; it must be a whole number"):
        from_dict(Paper, {"title": "", "pages": [1, "two"]})
