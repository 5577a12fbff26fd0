"""Read SentencePiece `.model` files, with a reader for the part of the protobuf format that they use.

    vocabulary, special = read_sentencepiece_model(Path("tokenizer.model").read_bytes())

Message and field numbers: sentencepiece, src/sentencepiece_model.proto.
"""

import struct
from typing import Literal

from clearhead.errors import ClearheadError
from clearhead.tokenization.library_tokenizer import SpecialTokens
from clearhead.tokenization.sentencepiece import Piece, PieceType, SentencePieceVocabulary

# A protobuf message: field number -> its values in order. Values of fixed width stay bytes.
_Fields = dict[int, list[int | bytes]]

_ALGORITHMS: dict[int, Literal["bpe", "unigram"]] = {1: "unigram", 2: "bpe"}


def read_sentencepiece_model(content: bytes) -> tuple[SentencePieceVocabulary, SpecialTokens]:
    """Return the vocabulary of a `.model` file, and the special tokens that it defines."""
    model = _read_fields(content)
    pieces = [_read_piece(index, message) for index, message in enumerate(_messages(model, 1))]
    if not pieces:
        raise ClearheadError("the file contains no SentencePiece pieces")
    # A message that is stored in parts is their concatenation.
    trainer = _read_fields(b"".join(_messages(model, 2)))
    normalizer = _read_fields(b"".join(_messages(model, 3)))
    algorithm = _ALGORITHMS.get(_integer(trainer, 3, default=1))
    if algorithm is None:
        raise ClearheadError("the SentencePiece model is of type word or char; only unigram and bpe are supported")
    if _integer(trainer, 24, default=0) or not _integer(normalizer, 5, default=1):
        raise ClearheadError("the SentencePiece model does not write the space before a word as ▁, which is required")
    vocabulary = SentencePieceVocabulary(
        pieces=pieces,
        algorithm=algorithm,
        add_dummy_prefix=bool(_integer(normalizer, 3, default=1)),
        remove_extra_whitespaces=bool(_integer(normalizer, 4, default=1)),
        character_map=b"".join(_messages(normalizer, 2)[-1:]),
    )
    unknown = vocabulary.texts(PieceType.UNKNOWN)
    return vocabulary, SpecialTokens(
        unknown=unknown[0] if unknown else None,
        bos=_control_token(pieces, _integer(trainer, 41, default=1)),
        eos=_control_token(pieces, _integer(trainer, 42, default=2)),
        pad=_control_token(pieces, _integer(trainer, 43, default=-1)),
    )


def _read_piece(index: int, message: bytes) -> Piece:
    fields = _read_fields(message)
    try:
        text = b"".join(_messages(fields, 1)[-1:]).decode()
        (score,) = struct.unpack("<f", b"".join(_messages(fields, 2)[-1:]) or bytes(4))
        return Piece(text, score, PieceType(_integer(fields, 3, default=1)))
    except (ValueError, struct.error) as error:
        raise ClearheadError(f"piece {index} of the SentencePiece model is malformed") from error


def _control_token(pieces: list[Piece], token_id: int) -> str | None:
    """Return the control token with this id; None for -1, which a file stores as 2**64 - 1."""
    if 0 <= token_id < len(pieces) and pieces[token_id].type == PieceType.CONTROL:
        return pieces[token_id].text
    return None


def _messages(fields: _Fields, number: int) -> list[bytes]:
    values = fields.get(number, [])
    messages = [value for value in values if isinstance(value, bytes)]
    if len(messages) < len(values):
        raise ClearheadError(f"field {number} of the SentencePiece model has the wrong type")
    return messages


def _integer(fields: _Fields, number: int, *, default: int) -> int:
    value = fields.get(number, [default])[-1]
    if not isinstance(value, int):
        raise ClearheadError(f"field {number} of the SentencePiece model has the wrong type")
    return value


def _read_fields(message: bytes) -> _Fields:
    """Read one protobuf message: tag, value, tag, value; the low three bits of a tag are the wire type.

    protobuf.dev, "Encoding": 0 is a varint, 1 eight bytes, 2 a length and that many bytes, 5 four bytes.
    """
    fields: _Fields = {}
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            value, position = _read_varint(message, position)
            fields.setdefault(number, []).append(value)
            continue
        if wire_type == 2:
            length, position = _read_varint(message, position)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ClearheadError(
                f"the file is not a SentencePiece model: wire type {wire_type} at byte {position} is not valid"
            )
        if position + length > len(message):
            raise ClearheadError(f"the SentencePiece model is truncated at byte {len(message)}")
        fields.setdefault(number, []).append(message[position : position + length])
        position += length
    return fields


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a number stored in groups of seven bits, lowest first, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise ClearheadError(f"the SentencePiece model is truncated at byte {len(message)}")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ClearheadError(f"the file is not a SentencePiece model: a number at byte {position} does not end")
