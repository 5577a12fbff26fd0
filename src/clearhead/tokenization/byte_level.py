"""Byte-level vocabularies: the alphabet that writes every byte as a visible character.

in_byte_alphabet("é".encode())   # 'Ã©'
"""

from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers


def _byte_alphabet() -> list[str]:
    """Printable Latin-1 characters stand for themselves, the other bytes for 256 upwards, in order.

    Radford et al. 2019 (GPT-2), encoder.py of its release.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_ALPHABET = tuple(_byte_alphabet())
BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}


def in_byte_alphabet(token: bytes) -> str:
    """The token as byte-level vocabularies spell it."""
    return "".join(BYTE_ALPHABET[byte] for byte in token)


def from_byte_alphabet(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    splits: Sequence[str],
    whole_words_first: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> tokenizers.Tokenizer:
    """Byte-level BPE that cuts text by each pattern of `splits` in turn before it merges.

    `whole_words_first`: a piece that is a token as a whole is not built by merges.
    """
    library = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges), ignore_merges=whole_words_first))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    return library


def merges_by_rank(ranked: Sequence[str]) -> list[tuple[str, str]]:
    """Every way to build each token from two others, for tokens given from first to last to be built.

    BPE by rank joins the neighbours whose joint text comes first in `ranked`, however it is cut; a list
    of pairs in that order does the same.
    """
    known = set(ranked)
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
