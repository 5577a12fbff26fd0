"""The two smallest tokenizers: one token per byte, or one per character.

byte_tokenizer().encode("é")                  # [195, 169]
character_tokenizer("to be").encode("bet")    # indices into the sorted characters ' beot'
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import BYTE_ALPHABET, byte_level_bpe
from clearhead.tokenization.library_tokenizer import (
    LibraryTokenizer,
    SpecialTokens,
    convert_library_errors,
    mark_special,
)


def byte_tokenizer(special: SpecialTokens | None = None, extra_tokens: Iterable[str] = ()) -> LibraryTokenizer:
    """Return a tokenizer whose ids 0 to 255 are the bytes of UTF-8, followed by the special tokens.

    extra_tokens: special tokens without a role, at the end.
    """
    special = special or SpecialTokens(eos="<|endoftext|>")
    marked = [*special.present(), *extra_tokens]
    library = byte_level_bpe(_assign_ids([*BYTE_ALPHABET, *marked]), merges=[], patterns=[])
    mark_special(library, marked)
    return LibraryTokenizer(library, special)


def character_tokenizer(characters: Iterable[str], special: SpecialTokens | None = None) -> LibraryTokenizer:
    """Return a tokenizer of the distinct characters of a text or list, in sorted order, then the special tokens.

    `special` must include an `unknown` token, which stands for every other character.
    """
    special = special or SpecialTokens(unknown="<|unknown|>")
    if special.unknown is None:
        raise ClearheadError("a character tokenizer needs an unknown token for characters it has not seen")
    sorted_characters = sorted(set(characters))
    if any(len(character) != 1 for character in sorted_characters):
        raise ClearheadError(
            "each token of a character tokenizer must be a single character; one of these is longer or empty"
        )
    vocabulary = _assign_ids([*sorted_characters, *special.present()])
    # The library rejects unpaired surrogates.
    with convert_library_errors("the characters cannot form a vocabulary"):
        library = tokenizers.Tokenizer(models.BPE(vocabulary, merges=[], unk_token=special.unknown))
    library.decoder = decoders.Fuse()
    mark_special(library, special.present())
    return LibraryTokenizer(library, special)


def _assign_ids(tokens: list[str]) -> dict[str, int]:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise ClearheadError("a special token is also a character of the vocabulary; choose another special token")
    return ids
