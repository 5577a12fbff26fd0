"""Encode the pieces of texts as server-sent events. Without HTTP.

    encoder = EventEncoder(CompletionFormat(head, asked), lambda: job.usage); content = encoder.encode(pieces)

Most pieces are only some characters. The events of these differ in nothing but the text, so they are not encoded as
JSON each time: the text is put between two constants, which are taken from the JSON of one such event.
"""

from collections.abc import Callable, Sequence
from typing import Any

from clearhead.server.answers import AnswerFormat
from clearhead.server.choice import Piece
from clearhead.server.job import Usage
from clearhead.server.json_text import encode_json

_MARK = "\ue000text\ue000"  # stands for a text; JSON does not change these characters


class EventEncoder:
    """Encodes the pieces of one answer."""

    def __init__(self, form: AnswerFormat, usage: Callable[[], Usage]):
        """Begin an answer. usage: returns the tokens so far."""
        self._form, self._usage = form, usage
        self._templates: dict[int, tuple[bytes, bytes] | None] = {}  # of texts that have begun, by index

    def encode(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events of some pieces, one or more for each piece that is not empty."""
        return b"".join([self._encode_piece(piece) for piece in pieces])

    def _encode_piece(self, piece: Piece) -> bytes:
        template = self._templates.get(piece.index)
        if template is not None and piece.is_only_text:
            return template[0] + encode_json(piece.text) + template[1]
        events = [encode_event(chunk) for chunk in self._form.chunks(piece, self._usage())]
        if piece.index not in self._templates:
            self._templates[piece.index] = _make_template(self._form.text_chunk(piece.index, _MARK))
        return b"".join(events)

    def encode_end(self) -> bytes:
        """Return the events after all texts have ended, and what ends the stream."""
        events = [encode_event(chunk) for chunk in self._form.last_chunks(self._usage())]
        return b"".join(events) + self._form.ending


def _make_template(chunk: dict[str, Any] | None) -> tuple[bytes, bytes] | None:
    """Return what is before and after the text in an event; None if there is no such event."""
    if chunk is None:
        return None
    parts = encode_event(chunk).split(encode_json(_MARK))
    return (parts[0], parts[1]) if len(parts) == 2 else None  # the name of a model could contain the mark


def encode_event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event; that of an API with named events has its name as `type`."""
    name = data.get("type")
    head = f"event: {name}\n".encode() if isinstance(name, str) else b""
    return head + b"data: " + encode_json(data) + b"\n\n"
