"""ClearheadError and the message for an unknown name."""

import pytest

from clearhead.errors import ClearheadError, quote, require, shorten, unknown_name


def test_clearhead_error_is_a_value_error():
    assert issubclass(ClearheadError, ValueError)
    with pytest.raises(ValueError, match="did you mean"):
        raise unknown_name("preset", "gtp2", ["gpt2"])


def test_require_raises_its_message_if_the_condition_is_false():
    require(True, "unused")
    with pytest.raises(ClearheadError, match=r"^width is 0$"):
        require(False, "width is 0")


def test_the_nearest_name_is_suggested():
    error = unknown_name("preset", "gtp2", ["gpt2", *(f"llama-{number}b" for number in range(8))])
    assert isinstance(error, ClearheadError)
    assert str(error) == "unknown preset 'gtp2'; did you mean 'gpt2'?"


def test_suggestions_ignore_upper_and_lower_case():
    assert "did you mean 'gpt2'?" in str(unknown_name("preset", "GPT2", ["gpt2", "Q4_K"]))
    assert "did you mean 'Q4_K'?" in str(unknown_name("preset", "q4-k", ["gpt2", "Q4_K"]))


def test_a_short_list_of_choices_follows_the_suggestion():
    error = unknown_name("weights", "int2", ["full", "int4"])
    assert str(error) == "unknown weights 'int2'; did you mean 'int4'? Available: full, int4"


def test_where_listed_replaces_a_long_list_of_choices():
    names = [f"llama-{number}b" for number in range(30)]
    near = str(unknown_name("model", "lama-7b", names, "`get` lists them"))
    assert near.startswith("unknown model 'lama-7b'; did you mean 'llama-7b', 'llama-")
    assert near.endswith("? `get` lists them")
    assert str(unknown_name("model", "zzz", names, "`get` lists them")) == "unknown model 'zzz'; `get` lists them"


def test_without_a_near_name_the_choices_are_listed_in_order():
    assert str(unknown_name("kind", "zzz", ["pear", "apple"])) == "unknown kind 'zzz'; available: apple, pear"


def test_a_list_of_more_than_twelve_choices_is_cut():
    names = [f"name-{number:02}" for number in range(20)]
    message = str(unknown_name("kind", "zzz", names))
    assert message.endswith("name-11, …")
    assert "name-12" not in message
    assert "…" not in str(unknown_name("kind", "zzz", names[:12]))


def test_an_empty_list_of_choices_is_shown_as_none():
    assert str(unknown_name("kind", "zzz", [])) == "unknown kind 'zzz'; available: (none)"


@pytest.mark.parametrize("name", ["", "'", "a\nb", "名", "x" * 5000])
def test_the_message_is_one_line_for_any_name(name):
    assert "\n" not in str(unknown_name("kind", name, iter(["apple"])))


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, b"x" * 10**6, ["x"] * 10**6, {"x" * 10**6: 1}, 10**4000, 16**10_000],
    ids=["text", "bytes", "list", "dict", "number", "number that has no repr"],
)
def test_a_large_value_is_shown_in_part(value):
    assert len(quote(value)) < 100


def test_a_small_value_is_shown_as_its_repr():
    assert [quote(value) for value in ("a\n", 1.5, None, [1, "b"])] == ["'a\\n'", "1.5", "None", "[1, 'b']"]


def test_a_shortened_text_ends_with_an_ellipsis():
    assert (shorten("abcd", 4), shorten("abcde", 4)) == ("abcd", "abcd…")


def test_the_name_in_the_message_for_an_unknown_name_is_shortened():
    assert len(str(unknown_name("kind", "x" * 10**6, ["apple"]))) < 200


def test_a_message_that_is_too_long_keeps_its_start_and_its_end():
    message = str(ClearheadError("the start " + "x" * 10**6 + " the end"))
    assert message.startswith("the start x")
    assert message.endswith("x the end")
    assert " … " in message
    assert len(message) < 5000


def test_longer_names_with_the_same_beginning_are_suggested_first():
    names = ["llama-30b", "llama-13b", "llama-3-8b", "llama-3-70b", "gpt2"]
    message = str(unknown_name("model", "Llama-3", names, "`clearhead presets` lists all"))
    assert "did you mean 'llama-3-8b', 'llama-3-70b' or 'llama-30b'?" in message
