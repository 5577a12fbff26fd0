"""Answers over HTTP while a client is there: server-sent events, and complete answers.

    await send_stream(job, ChatFormat(head, asked), receive, send, connection)

If the client goes away, or is cut off because it does not read, waiting ends, and the job must be closed, which ends
its texts within one step.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive, Send

from clearhead.server.answers import AnswerFormat
from clearhead.server.api_errors import ApiError
from clearhead.server.choice import Piece
from clearhead.server.job import Job
from clearhead.server.protocol import Connection
from clearhead.server.stream_events import EventEncoder, encode_event

T = TypeVar("T")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),  # proxies must not hold events back
]


class ClientGoneError(Exception):
    """The client has closed its connection, or does not read."""


async def send_stream(job: Job, form: AnswerFormat, receive: Receive, send: Send, connection: Connection) -> None:
    """Send the pieces of a job as server-sent events.

    Raise ApiError for errors before the first token, and ClientGoneError if the client goes away or does not read.
    """
    await run_while_connected(_send_events(job, form, send, connection), receive)


async def _send_events(job: Job, form: AnswerFormat, send: Send, connection: Connection) -> None:
    """Send the head, the events of all pieces, and the end of a stream. An error becomes the last event.

    The events are written where the job reports its pieces, without waiting: this coroutine sleeps while tokens arrive.
    """
    encoder, held = EventEncoder(form, lambda: job.usage), list[bytes]()
    write: Callable[[bytes], None] = held.append  # until the head has been sent

    def add(pieces: Sequence[Piece]) -> None:
        if content := encoder.encode(pieces):
            write(content)

    job.start(add)
    await job.wait_for_first()
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    write = connection.write_body
    if held:
        write(b"".join(held))
    try:
        await job.wait()
        content = encoder.encode_end()
    except ApiError as error:
        content = encode_event(form.error_event(error))
    await send({"type": "http.response.body", "body": content, "more_body": False})


async def run_while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of a coroutine; cancel it and raise ClientGoneError if the client goes away.

    The body of the request must have been read.
    """
    gone, task = asyncio.create_task(_wait_until_gone(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
