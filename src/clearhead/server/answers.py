"""What all answers about generated texts share: ids, and complete texts from pieces. Without HTTP.

head = AnswerHead.create("cmpl", "smollm2", "fp_1"); texts = await collect(job)
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from clearhead.server.api_errors import ApiError
from clearhead.server.choice import FinishReason, Piece
from clearhead.server.job import Job, Usage
from clearhead.server.token_scores import TokenScore


@dataclass(frozen=True)
class AnswerHead:
    """The fields that are the same in an answer and in all chunks of a stream."""

    id: str
    created: int
    model: str
    fingerprint: str

    @staticmethod
    def create(prefix: str, model: str, fingerprint: str) -> "AnswerHead":
        """Return a head with a new id."""
        return AnswerHead(new_id(prefix), int(time.time()), model, fingerprint)

    def as_data(self, kind: str) -> dict[str, Any]:
        """Return the fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def new_id(prefix: str) -> str:
    """Return an id that occurs once."""
    return f"{prefix}-{secrets.token_hex(12)}"


DONE = b"data: [DONE]\n\n"  # ends the streams of completions and chats


@dataclass
class CompleteText:
    """A text that has ended."""

    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    finish_reason: FinishReason = "length"

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.scores += piece.scores
        self.finish_reason = piece.finish_reason or self.finish_reason


class AnswerFormat(Protocol):
    """How an endpoint writes its answers."""

    @property
    def ending(self) -> bytes:
        """What ends a stream."""

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""

    def chunks(self, piece: Piece, usage: Usage) -> list[dict[str, Any]]:
        """Return the events of a stream for a piece of a text."""

    def text_chunk(self, index: int, text: str, usage: Usage) -> dict[str, Any] | None:
        """Return the event of a piece, after the first one, that is only text.

        None: such events differ in more than the text and the numbers of tokens.
        """

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the events after all texts have ended."""

    def complete(self, texts: list[CompleteText], usage: Usage) -> dict[str, Any]:
        """Return the answer to a request without stream."""


async def collect(job: Job) -> list[CompleteText]:
    """Start a job, and return all its texts when they have ended."""
    texts = [CompleteText() for _ in job.choices]

    def add(pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            texts[piece.index].add(piece)

    job.start(add)
    await job.wait()
    return texts
