"""Stop strings are found in a text in pieces as in the whole text, and no more than necessary is held back."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.generation.stop_strings import StopStringMatcher

letters = st.text("abé", max_size=30)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)


def find_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first complete stop string (the longest that ends there), and whether there is one."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def longest_partial_stop(text: str, stops: list[str]) -> int:
    """Return the length of the longest incomplete stop string at the end of `text`."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def split(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(bounds)]


@settings(max_examples=500, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=12))
def test_a_text_in_pieces_gives_the_result_of_the_whole_text(text, stops, cuts):
    matcher = StopStringMatcher(stops)
    output, finished, pushed = "", False, ""
    for piece in split(text, cuts):
        new_output, finished = matcher.push(piece)
        pushed += piece
        output += new_output
        assert finished == find_stop(pushed, stops)[1]
        if finished:
            break
        pending = pushed[len(output) :]
        assert output + pending == pushed
        assert len(pending) == longest_partial_stop(pushed, stops)
    assert (output + matcher.finish(), finished) == find_stop(text, stops)


def test_a_stop_string_split_over_three_pieces_is_never_output():
    matcher = StopStringMatcher(["<|end|>"])
    assert matcher.push("Hi <") == ("Hi ", False)
    assert matcher.push("|en") == ("", False)
    assert matcher.push("d|> more") == ("", True)
    assert matcher.push("still more") == ("", True)
    assert matcher.finish() == ""


def test_pending_text_is_output_if_it_does_not_become_a_stop_string():
    matcher = StopStringMatcher("END")
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.push("VOY") == ("ENVOY", False)
    assert matcher.push(" E") == (" ", False)
    assert matcher.finish() == "E"


def test_of_overlapping_stop_strings_the_first_complete_one_ends_the_text():
    for pieces in (["xabc"], ["x", "a", "b", "c"], ["xab", "c"]):
        matcher = StopStringMatcher(["abc", "b"])
        assert "".join(matcher.push(piece)[0] for piece in pieces) == "xa"
    assert StopStringMatcher(["b", "ab"]).push("xab") == ("x", True)


def test_with_may_stop_false_a_stop_string_is_text():
    matcher = StopStringMatcher(["END", "N"])
    assert matcher.push("END EN", may_stop=False) == ("END ", False)
    assert matcher.push("D", may_stop=True) == ("", True)
    assert StopStringMatcher("END").push("END", may_stop=False) == ("END", False)


def test_without_stop_strings_nothing_is_held_back():
    matcher = StopStringMatcher([])
    assert matcher.push("abc") == ("abc", False)
    assert matcher.finish() == ""


def test_an_empty_stop_string_raises():
    with pytest.raises(ClearheadError, match="stop contains ''"):
        StopStringMatcher(["a", ""])
