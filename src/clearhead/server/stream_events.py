"""Encode the pieces of texts as server-sent events. Without HTTP.

    encoder = EventEncoder(CompletionFormat(head, asked), lambda: job.usage); content = encoder.encode(pieces)

Most pieces are only some characters. The events of these differ in nothing but the text and the numbers of tokens. So
not every event is encoded as JSON: text and numbers are put between constants, which are taken from the JSON of one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from clearhead.server.answers import AnswerFormat
from clearhead.server.choice import Piece
from clearhead.server.job import Usage
from clearhead.server.json_text import encode_json

_MARK = "\ue000text\ue000"  # stands for a text; JSON does not change these characters
_MARK_USAGE = Usage(-1, -2, -3)  # stands for the numbers of tokens


class EventEncoder:
    """Encodes the pieces of one answer."""

    def __init__(self, form: AnswerFormat, usage: Callable[[], Usage]):
        """Begin an answer. usage: returns the tokens so far."""
        self._form, self._usage = form, usage
        self._templates: dict[int, _Template | None] = {}  # of texts that have begun, by index

    def encode(self, pieces: Sequence[Piece]) -> bytes:
        """Return the events of some pieces, one or more for each piece that is not empty."""
        return b"".join([self._encode_piece(piece) for piece in pieces])

    def _encode_piece(self, piece: Piece) -> bytes:
        template = self._templates.get(piece.index)
        if template is not None and piece.is_only_text:
            before, after, end = template
            content = before + encode_json(piece.text) + after
            return content if end is None else content + self._usage().as_json() + end
        events = [encode_event(chunk) for chunk in self._form.chunks(piece, self._usage())]
        if piece.index not in self._templates:
            self._templates[piece.index] = _make_template(self._form.text_chunk(piece.index, _MARK, _MARK_USAGE))
        return b"".join(events)

    def encode_end(self) -> bytes:
        """Return the events after all texts have ended, and what ends the stream."""
        events = [encode_event(chunk) for chunk in self._form.last_chunks(self._usage())]
        return b"".join(events) + self._form.ending


class _Template(NamedTuple):
    """An event without its text: what is before it, what is after it, and what is after the numbers of tokens."""

    before: bytes
    after: bytes
    end: bytes | None  # None: the event has no numbers of tokens


def _make_template(chunk: dict[str, Any] | None) -> _Template | None:
    """Return the constants of an event; None if it is no event that differs only in text and numbers."""
    if chunk is None:
        return None
    parts = encode_event(chunk).split(encode_json(_MARK))
    if len(parts) != 2:  # the name of a model could contain the mark
        return None
    after, usage, end = parts[1].partition(_MARK_USAGE.as_json())
    return _Template(parts[0], after, end if usage else None)


def encode_event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event; that of an API with named events has its name as `type`."""
    name = data.get("type")
    head = f"event: {name}\n".encode() if isinstance(name, str) else b""
    return head + b"data: " + encode_json(data) + b"\n\n"
