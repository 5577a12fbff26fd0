"""Stop strings found piece by piece are those found in the whole text, and nothing is held back in vain."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ClearheadError
from clearhead.generation.stops import StopWatcher

letters = st.text("abé", max_size=30)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)


def searched(text: str, stops: list[str]) -> tuple[str, bool]:
    """Up to the first place where a stop string is complete, without the longest that ends there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def longest_beginning(text: str, stops: list[str]) -> int:
    """Of a stop string, but not the whole of it, at the end of `text`."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def split(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:stop] for start, stop in pairwise(places)]


@settings(max_examples=500, deadline=None)
@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=12))
def test_pieces_give_what_a_search_of_the_whole_gives(text, stops, cuts):
    watcher = StopWatcher(stops)
    shown, finished, pushed = "", False, ""
    for piece in split(text, cuts):
        emitted, finished = watcher.push(piece)
        pushed += piece
        shown += emitted
        assert finished == searched(pushed, stops)[1]
        if finished:
            break
        held = pushed[len(shown) :]
        assert shown + held == pushed
        assert len(held) == longest_beginning(pushed, stops)
    assert (shown + watcher.finish(), finished) == searched(text, stops)


def test_a_stop_split_over_three_pieces_is_never_shown():
    watcher = StopWatcher(["<|end|>"])
    assert watcher.push("Hi <") == ("Hi ", False)
    assert watcher.push("|en") == ("", False)
    assert watcher.push("d|> more") == ("", True)
    assert watcher.push("still more") == ("", True)
    assert watcher.finish() == ""


def test_held_text_is_shown_when_the_stop_does_not_come():
    watcher = StopWatcher("END")
    assert watcher.push("the EN") == ("the ", False)
    assert watcher.push("VOY") == ("ENVOY", False)
    assert watcher.push(" E") == (" ", False)
    assert watcher.finish() == "E"


def test_of_overlapping_stops_the_first_to_be_complete_ends_the_text():
    for pieces in (["xabc"], ["x", "a", "b", "c"], ["xab", "c"]):
        watcher = StopWatcher(["abc", "b"])
        assert "".join(watcher.push(piece)[0] for piece in pieces) == "xa"
    assert StopWatcher(["b", "ab"]).push("xab") == ("x", True)


def test_an_early_stop_is_text_but_its_beginning_still_counts():
    watcher = StopWatcher(["END", "N"])
    assert watcher.push("END EN", early=True) == ("END ", False)
    assert watcher.push("D", early=False) == ("", True)
    assert StopWatcher("END").push("END", early=True) == ("END", False)


def test_no_stops_hold_nothing():
    watcher = StopWatcher([])
    assert watcher.push("abc") == ("abc", False)
    assert watcher.finish() == ""


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ClearheadError, match="stop has ''"):
        StopWatcher(["a", ""])
