"""Read the `tokenizer.bin` of llama2.c: a SentencePiece vocabulary without its settings.

    tokenizer = read_tokenizer_bin(Path("tokenizer.bin").read_bytes())

    int32 longest token in bytes | for each token: float32 score, int32 bytes, its text

Format: llama2.c, tokenizer.py. Ids 0 to 2 are unknown, bos and eos; 3 to 258 are the bytes. The spelling of these
ids differs between versions of the file, so their texts are not read.
"""

import struct

from clearhead.errors import ClearheadError
from clearhead.tokenization.library_tokenizer import LibraryTokenizer, SpecialTokens
from clearhead.tokenization.sentencepiece import (
    Piece,
    PieceType,
    SentencePieceVocabulary,
    build_sentencepiece_tokenizer,
)
from clearhead.tokenization.sentencepiece_normalizer import META_SPACE

UNKNOWN, _BOS, _EOS = "<unk>", "<s>", "</s>"
_NUM_BYTES = 256
# Llama's longest token has 48 bytes; the released files state 27.
MAX_TOKEN_BYTES = 512


def read_tokenizer_bin(content: bytes) -> LibraryTokenizer:
    """Return the tokenizer of a `tokenizer.bin`; like Llama's, it adds bos, and a space before the text."""
    first = [(UNKNOWN, PieceType.UNKNOWN), (_BOS, PieceType.CONTROL), (_EOS, PieceType.CONTROL)]
    first += [(f"<0x{byte:02X}>", PieceType.BYTE) for byte in range(_NUM_BYTES)]
    entries = _read_entries(content)
    if len(entries) < len(first):
        raise ClearheadError(f"tokenizer.bin has {len(entries)} tokens; it must have at least {len(first)}")
    pieces = [Piece(text, 0.0, piece_type) for text, piece_type in first]
    for token_id, (token_bytes, score) in enumerate(entries[len(first) :], start=len(first)):
        try:
            text = token_bytes.decode()
        except UnicodeDecodeError as error:
            raise ClearheadError(f"token {token_id} of tokenizer.bin is not UTF-8") from error
        pieces.append(Piece(text.replace(" ", META_SPACE), score, PieceType.NORMAL))
    return build_sentencepiece_tokenizer(
        SentencePieceVocabulary(pieces=pieces, algorithm="bpe"),
        SpecialTokens(bos=_BOS, eos=_EOS, unknown=UNKNOWN),
        adds_bos=True,
    )


def _read_entries(content: bytes) -> list[tuple[bytes, float]]:
    if len(content) < 4:
        raise ClearheadError(f"tokenizer.bin has {len(content)} bytes; it must have more than 4")
    (longest,) = struct.unpack_from("<i", content)
    if not 0 < longest <= MAX_TOKEN_BYTES:
        raise ClearheadError(
            f"tokenizer.bin states that its longest token has {longest} bytes; it must be from 1 to {MAX_TOKEN_BYTES}"
        )
    entries: list[tuple[bytes, float]] = []
    position = 4
    while position < len(content):
        if position + 8 > len(content):
            raise ClearheadError(f"tokenizer.bin is truncated in token {len(entries)}")
        score, length = struct.unpack_from("<fi", content, position)
        position += 8
        if not 0 <= length <= longest:
            raise ClearheadError(
                f"token {len(entries)} of tokenizer.bin has {length} bytes, more than the stated maximum of {longest}"
            )
        if position + length > len(content):
            raise ClearheadError(f"tokenizer.bin is truncated in token {len(entries)}")
        entries.append((content[position : position + length], score))
        position += length
    return entries
