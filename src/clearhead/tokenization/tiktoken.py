"""Read tiktoken rank files: one token per line, in base64, and the rank at which it is built.

tokenizer = read_ranks(Path("cl100k_base.tiktoken").read_bytes(), encoding="cl100k")
"""

import base64
import binascii
from collections.abc import Mapping

from clearhead.errors import ClearheadError
from clearhead.tokenization.byte_level import byte_level_bpe, in_byte_alphabet, merges_by_rank
from clearhead.tokenization.fast import FastTokenizer, SpecialTokens, mark_special
from clearhead.tokenization.splits import tiktoken_split

END_OF_TEXT = "<|endoftext|>"
# tiktoken, tiktoken_ext/openai_public.py.
SPECIAL_TOKENS: dict[str, dict[str, int]] = {
    "r50k": {END_OF_TEXT: 50256},
    "p50k": {END_OF_TEXT: 50256},
    "cl100k": {
        END_OF_TEXT: 100257,
        "<|fim_prefix|>": 100258,
        "<|fim_middle|>": 100259,
        "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    },
    "o200k": {END_OF_TEXT: 199999, "<|endofprompt|>": 200018},
}
# The longest of OpenAI's tokens has 128 bytes; every cut of each is tried.
MAX_TOKEN_BYTES = 512


def read_ranks(content: bytes, encoding: str, special_tokens: Mapping[str, int] | None = None) -> FastTokenizer:
    """The tokenizer of a rank file. `encoding` names how text is split; its special tokens are the default."""
    pattern = tiktoken_split(encoding)
    if special_tokens is None:
        special_tokens = SPECIAL_TOKENS[encoding.removesuffix("_base")]
    ranks = _parse(content)
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise ClearheadError(f"the tiktoken file has no token for byte {missing:#04x}; it must have all 256")
    spelled = {in_byte_alphabet(token): rank for token, rank in ranks.items()}
    taken = {*ranks.values()} & {*special_tokens.values()}
    if taken or {*spelled} & {*special_tokens}:
        raise ClearheadError(f"special tokens and ranks overlap: {sorted(taken) or sorted(special_tokens)}")
    library = byte_level_bpe(
        {**spelled, **special_tokens},
        merges_by_rank(sorted(spelled, key=spelled.__getitem__)),
        [pattern],
        whole_words_first=True,
    )
    mark_special(library, special_tokens)
    end = END_OF_TEXT if END_OF_TEXT in special_tokens else None
    return FastTokenizer(library, SpecialTokens(bos=end, eos=end))


def _parse(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error) as error:
            raise ClearheadError(f"line {number} of the tiktoken file is not a base64 token and its rank") from error
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ClearheadError(
                f"line {number} of the tiktoken file has a token of {len(token)} bytes; 1 to {MAX_TOKEN_BYTES} work"
            )
        if token in ranks or not 0 <= rank < 2**31:
            raise ClearheadError(f"line {number} of the tiktoken file repeats a token or has a rank out of range")
        ranks[token] = rank
    if len({*ranks.values()}) < len(ranks):
        raise ClearheadError("two tokens of the tiktoken file have the same rank")
    return ranks
