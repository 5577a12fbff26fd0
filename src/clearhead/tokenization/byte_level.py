"""Byte-level vocabularies, whose alphabet writes every byte as a visible character.

to_byte_alphabet("é".encode())   # 'Ã©'
"""

from collections.abc import Iterable, Mapping, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from clearhead.tokenization.tokenizer_limits import check_vocabulary


def _byte_alphabet() -> list[str]:
    """Return the character of each byte: printable Latin-1 as it is, the other bytes as 256 upwards, in order.

    Radford et al. 2019 (GPT-2), encoder.py of its release.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


BYTE_ALPHABET = tuple(_byte_alphabet())
_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}


def to_byte_alphabet(token: bytes) -> str:
    """Return the bytes of a token as byte-level vocabularies spell them."""
    return "".join(BYTE_ALPHABET[byte] for byte in token)


def from_byte_alphabet(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with a character outside the alphabet is encoded as UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Iterable[tuple[str, str]],
    patterns: Sequence[str],
    ignore_merges: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> tokenizers.Tokenizer:
    """Return byte-level BPE that splits text by each of `patterns` in order before it merges.

    With `ignore_merges`, a piece that is a token as a whole is taken without applying merges.
    """
    library = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges), ignore_merges=ignore_merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    return library


def merges_by_rank(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return every way to build each token from two others, for tokens in order of their rank.

    BPE by rank merges the neighbors whose concatenation has the lowest rank, however it is split; a list of merges
    in this order gives the same result.
    """
    check_vocabulary(tokens, is_unigram=False)
    known = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
