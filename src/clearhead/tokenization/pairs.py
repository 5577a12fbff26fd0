"""Encode a text, or a pair of texts, for a model that reads it in one forward pass; cut off what does not fit.

encoded = encode_pair(tokenizer, "a question", "a passage", max_tokens=512); encoded.ids, encoded.token_types
"""

from dataclasses import dataclass

from clearhead.errors import ClearheadError
from clearhead.tokenization.interface import Tokenizer
from clearhead.tokenization.library_tokenizer import LibraryTokenizer


@dataclass(frozen=True)
class EncodedText:
    """Token ids, and for each the number of the text that it belongs to, as the tokenizer counts them."""

    ids: list[int]
    token_types: list[int]


def encode_pair(
    tokenizer: Tokenizer, text: str, second: str | None = None, max_tokens: int | None = None
) -> EncodedText:
    """Return the tokens of a text or a pair with the special tokens around them, at most `max_tokens`.

    What is too long is cut off at its end; of a pair, the longer text first, as the tokenizers library does.
    """
    if isinstance(tokenizer, LibraryTokenizer):
        return EncodedText(*tokenizer.encode_pair(text, second, max_tokens))
    if second is not None:
        raise ClearheadError("this tokenizer reads single texts only; a pair of texts needs one with a tokenizer.json")
    ids = tokenizer.encode(text)
    if max_tokens is not None and len(ids) > max_tokens:
        content = tokenizer.encode(text, add_special_tokens=False)
        num_special = len(ids) - len(content)
        starts = range(num_special + 1)
        start = next((start for start in starts if ids[start : start + len(content)] == content), 0)
        end = start + max(max_tokens - num_special, 0)
        ids = ids[:end] + ids[start + len(content) :]
    return EncodedText(ids, [0] * len(ids))
