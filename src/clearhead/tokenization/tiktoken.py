"""Read tiktoken rank files, which hold one base64 token and its rank per line.

tokenizer = read_rank_file(Path("cl100k_base.tiktoken").read_bytes(), encoding="cl100k")
"""

import base64
import binascii
from collections.abc import Mapping

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import byte_level_bpe, merges_by_rank, to_byte_alphabet
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens, mark_special
from clearhead.tokenization.pre_tokenization import tiktoken_pattern

_END_OF_TEXT = "<|endoftext|>"
# Source: tiktoken, tiktoken_ext/openai_public.py
SPECIAL_TOKENS: dict[str, dict[str, int]] = {
    "r50k": {_END_OF_TEXT: 50256},
    "p50k": {_END_OF_TEXT: 50256},
    "cl100k": {
        _END_OF_TEXT: 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
    "o200k": {_END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
}
# OpenAI's longest token has 128 bytes; every split of each token is tried for merges.
MAX_TOKEN_BYTES = 512


def read_rank_file(content: bytes, encoding: str, special_tokens: Mapping[str, int] | None = None) -> LibraryTokenizer:
    """Return the tokenizer of a rank file.

    `encoding` selects the pattern that splits a text, and the special tokens if none are given.
    """
    pattern = tiktoken_pattern(encoding)
    if special_tokens is None:
        special_tokens = SPECIAL_TOKENS[encoding.removesuffix("_base")]
    ranks = _parse(content)
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ClearheadError(f"the tiktoken file has no token for byte {missing:#04x}; it must have all 256")
    spelled = {to_byte_alphabet(token): rank for token, rank in ranks.items()}
    overlapping = {*ranks.values()} & {*special_tokens.values()}
    if overlapping or {*spelled} & {*special_tokens}:
        raise ClearheadError(f"special tokens and ranks overlap: {sorted(overlapping) or sorted(special_tokens)}")
    library = byte_level_bpe(
        {**spelled, **special_tokens},
        merges_by_rank(sorted(spelled, key=spelled.__getitem__)),
        [pattern],
        ignore_merges=True,
    )
    mark_special(library, special_tokens)
    end_of_text = _END_OF_TEXT if _END_OF_TEXT in special_tokens else None
    return LibraryTokenizer(library, SpecialTokens(bos=end_of_text, eos=end_of_text))


def _parse(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise ClearheadError(
                f"line {number} of the tiktoken file must be a base64 token and its rank, separated by a space"
            ) from error
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ClearheadError(
                f"line {number} of the tiktoken file has a token of {len(token)} bytes, not of 1 to {MAX_TOKEN_BYTES}"
            )
        if token in ranks or not 0 <= rank < 2**31:
            raise ClearheadError(f"line {number} of the tiktoken file repeats a token or has a rank out of range")
        ranks[token] = rank
    if len({*ranks.values()}) < len(ranks):
        raise ClearheadError("two tokens of the tiktoken file have the same rank")
    return ranks
