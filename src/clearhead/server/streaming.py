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
    async with _Writer(send, limits.write_seconds) as writer:
        await writer.write({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await writer.write_body(_encode(form, first, job))
        try:
            async for following in pieces:
                if content := _encode(form, following, job):
                    await writer.write_body(content)
            content = b"".join(_encode_event(chunk) for chunk in form.last_chunks(job.usage)) + form.ending
        except ApiError as error:
            content = _encode_event(form.error_event(error))
        await writer.write_body(content, is_last=True)


def _encode(form: AnswerFormat, pieces: list[Piece], job: Job) -> bytes:
    usage = job.usage
    return b"".join(_encode_event(chunk) for piece in pieces for chunk in form.chunks(piece, usage))


def _encode_event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event; that of an API with named events has its name as `type`."""
    name = data.get("type")
    head = f"event: {name}\n".encode() if isinstance(name, str) else b""
    return head + b"data: " + encode_json(data) + b"\n\n"


class _Writer:
    """Sends the messages of one answer. A client that leaves its buffers full for too long counts as gone.

    Most messages are sent at once, so one timer per answer checks now and then whether a message is stuck.
    """

    def __init__(self, send: Send, seconds: float):
        self._send, self._seconds = send, seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the message that is being sent was begun
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> "_Writer":
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(*exception)
        except TimeoutError:
            raise ClientGoneError from None

    async def write_body(self, content: bytes, is_last: bool = False) -> None:
        """Send a part of the body."""
        await self.write({"type": "http.response.body", "body": content, "more_body": not is_last})

    async def write(self, message: Message) -> None:
        """Send a message. Raise ClientGoneError if the client has gone."""
        self._since = self._loop.time()
        try:
            await self._send(message)
        except OSError:
            raise ClientGoneError from None
        self._since = None

    def _check(self) -> None:
        """End the answer if a message has taken too long; otherwise look again when the next one might have."""
        now = self._loop.time()
        due = now + self._seconds if self._since is None else self._since + self._seconds
        if due <= now:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(due, self._check)


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
