"""Answers over HTTP while a client is there: server-sent events, and complete answers.

    await send_stream(job, ChatFormat(head, asked), receive, send, limits)

If the client goes away, or does not read for too long, the job is closed, which ends its texts within one step.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from clearhead.server.answers import AnswerFormat
from clearhead.server.api_errors import ApiError
from clearhead.server.choice import Piece
from clearhead.server.job import Job
from clearhead.server.json_text import encode_json
from clearhead.server.settings import Limits

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold events back
]


class ClientGoneError(Exception):
    """The client has closed its connection, or does not read."""


async def send_stream(job: Job, form: AnswerFormat, receive: Receive, send: Send, limits: Limits) -> None:
    """Send the pieces of a job as server-sent events.

    Raise ApiError for errors before the first token, and ClientGoneError if the client goes away or does not read.
    """
    try:
        async with _Connection(receive) as connection:
            pieces = job.pieces()
            first = await connection.wait(anext(pieces))
            await connection.wait(_write_events(job, form, first, pieces, send, limits))
    finally:
        job.close()


async def _write_events(
    job: Job,
    form: AnswerFormat,
    first: list[Piece],
    pieces: AsyncIterator[list[Piece]],
    send: Send,
    limits: Limits,
) -> None:
    """Write the head, the events of all pieces, and the end of a stream. An error becomes the last event."""
    await _write(send, {"type": "http.response.start", "status": 200, "headers": _HEADERS}, limits)
    await _write_body(send, _encode(form, first, job), limits)
    try:
        async for following in pieces:
            if content := _encode(form, following, job):
                await _write_body(send, content, limits)
        content = b"".join(_encode_event(chunk) for chunk in form.last_chunks(job.usage)) + form.ending
    except ApiError as error:
        content = _encode_event(form.error_event(error))
    await _write(send, {"type": "http.response.body", "body": content, "more_body": False}, limits)


def _encode(form: AnswerFormat, pieces: list[Piece], job: Job) -> bytes:
    usage = job.usage
    return b"".join(_encode_event(chunk) for piece in pieces for chunk in form.chunks(piece, usage))


def _encode_event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event; that of an API with named events has its name as `type`."""
    name = data.get("type")
    head = f"event: {name}\n".encode() if isinstance(name, str) else b""
    return head + b"data: " + encode_json(data) + b"\n\n"


async def _write_body(send: Send, content: bytes, limits: Limits) -> None:
    await _write(send, {"type": "http.response.body", "body": content, "more_body": True}, limits)


async def _write(send: Send, message: Message, limits: Limits) -> None:
    """Send a message. A client that leaves its buffers full for too long counts as gone."""
    try:
        async with asyncio.timeout(limits.write_seconds):
            await send(message)
    except (TimeoutError, OSError):
        raise ClientGoneError from None


async def run_while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of a coroutine; cancel it and raise ClientGoneError if the client goes away."""
    async with _Connection(receive) as connection:
        return await connection.wait(work)


class _Connection:
    """Watches a client while work is done for it. The body of its request must have been read."""

    def __init__(self, receive: Receive):
        self._receive = receive

    async def __aenter__(self) -> "_Connection":
        self._gone = asyncio.create_task(_wait_until_gone(self._receive))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._gone.cancel()

    async def wait(self, work: Awaitable[T]) -> T:
        """Return the result of some work, or cancel it and raise ClientGoneError."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGoneError
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
