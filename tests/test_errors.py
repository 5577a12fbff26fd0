"""The one error of a user, and the nearest right name."""

import pytest

from clearhead.errors import ClearheadError, unknown_name


def test_it_is_a_value_error():
    assert issubclass(ClearheadError, ValueError)
    with pytest.raises(ValueError, match="did you mean"):
        raise unknown_name("preset", "gtp2", ["gpt2"])


def test_the_nearest_name_is_offered():
    error = unknown_name("preset", "gtp2", ["gpt2", *(f"llama-{number}b" for number in range(8))])
    assert isinstance(error, ClearheadError)
    assert str(error) == "unknown preset 'gtp2'; did you mean 'gpt2'?"


def test_capital_letters_are_near():
    assert "did you mean 'gpt2'?" in str(unknown_name("preset", "GPT2", ["gpt2", "Q4_K"]))
    assert "did you mean 'Q4_K'?" in str(unknown_name("preset", "q4-k", ["gpt2", "Q4_K"]))


def test_few_names_are_all_told_beside_the_nearest():
    error = unknown_name("weights", "int2", ["full", "int4"])
    assert str(error) == "unknown weights 'int2'; did you mean 'int4'? Known are: full, int4"


def test_many_names_are_listed_elsewhere():
    names = [f"llama-{number}b" for number in range(30)]
    near = str(unknown_name("model", "lama-7b", names, "`get` lists them"))
    assert near.startswith("unknown model 'lama-7b'; did you mean 'llama-7b' or 'llama-")
    assert near.endswith("? `get` lists them")
    assert str(unknown_name("model", "zzz", names, "`get` lists them")) == "unknown model 'zzz'; `get` lists them"


def test_without_a_near_name_the_known_ones_are_listed_in_order():
    assert str(unknown_name("kind", "zzz", ["pear", "apple"])) == "unknown kind 'zzz'; known are: apple, pear"


def test_a_long_list_is_cut():
    names = [f"name-{number:02}" for number in range(20)]
    sentence = str(unknown_name("kind", "zzz", names))
    assert sentence.endswith("name-11, …")
    assert "name-12" not in sentence
    assert "…" not in str(unknown_name("kind", "zzz", names[:12]))


def test_an_empty_list_is_said_to_be_empty():
    assert str(unknown_name("kind", "zzz", [])) == "unknown kind 'zzz'; known are: (none)"


@pytest.mark.parametrize("name", ["", "'", "a\nb", "名", "x" * 5000])
def test_any_name_makes_one_line(name):
    assert "\n" not in str(unknown_name("kind", name, iter(["apple"])))
