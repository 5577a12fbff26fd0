"""The two smallest tokenizers: one token per byte, or one per character.

byte_tokenizer().encode("é")                  # [195, 169]
character_tokenizer("to be").encode("bet")    # places in the sorted characters ' beot'
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import BYTE_ALPHABET, byte_level_bpe
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens, library_errors, mark_special


def byte_tokenizer(special: SpecialTokens | None = None) -> FastTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; the special tokens follow."""
    special = special or SpecialTokens(eos="<|endoftext|>")
    tokens = [*BYTE_ALPHABET, *special.present()]
    library = byte_level_bpe(_numbered(tokens), merges=[], splits=[])
    mark_special(library, special.present())
    return FastTokenizer(library, special)


def character_tokenizer(characters: Iterable[str], special: SpecialTokens | None = None) -> FastTokenizer:
    """Each distinct character of a text or list, in sorted order; the special tokens follow.

    One of them must be `unknown`: it stands for every other character.
    """
    special = special or SpecialTokens(unknown="<|unknown|>")
    if special.unknown is None:
        raise ClearheadError("a character tokenizer needs an unknown token for characters it has not seen")
    ordered = sorted(set(characters))
    if any(len(character) != 1 for character in ordered):
        raise ClearheadError("a character tokenizer is made from single characters")
    vocabulary = _numbered([*ordered, *special.present()])
    with library_errors("these characters make no vocabulary"):  # one of them may be half a character
        library = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[], unk_token=special.unknown))
    library.decoder = decoders.Fuse()
    mark_special(library, special.present())
    return FastTokenizer(library, special)


def _numbered(tokens: list[str]) -> dict[str, int]:
    numbered = {token: token_id for token_id, token in enumerate(tokens)}
    if len(numbered) < len(tokens):
        raise ClearheadError("a special token is also a character of the vocabulary")
    return numbered
