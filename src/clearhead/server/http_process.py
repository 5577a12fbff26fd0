"""One HTTP process of a server: accept connections, speak HTTP, and forward requests to the main process. No torch.

    python -m clearhead.server.http_process LISTENER CHANNEL LIMITS    two file descriptors, and limits in JSON

The main process starts it (http_processes.py). It ends as soon as the main process closes the channel, however that
happens, and cuts off clients whose answers are not complete then.
"""

import asyncio
import itertools
import json
import logging
import socket
import sys
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from clearhead.server.frames import Frame, FrameChannel, Kind, decode_head, encode_scope
from clearhead.server.http_server import HttpServer
from clearhead.server.protocol import CONNECTION, Connection
from clearhead.server.settings import Limits

_LOGGER = logging.getLogger("clearhead.server")


class _Forwarder:
    """An ASGI application that lets the main process answer."""

    def __init__(self, limits: Limits, on_end: Callable[[], None]):
        """on_end: is called when the main process has closed the channel."""
        self._limits, self._on_end = limits, on_end
        self.channel = FrameChannel(self._handle, self._end)
        self._numbers = itertools.count()
        self._answers: dict[int, _Answer] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, and send what comes back."""
        number = next(self._numbers)
        answer = self._answers[number] = _Answer(scope["state"][CONNECTION])
        self.channel.send(Kind.REQUEST, number, encode_scope(scope))
        reading = asyncio.create_task(self._forward_body(number, receive))
        answering = asyncio.create_task(answer.send(send))
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()  # raises what went wrong
        finally:
            reading.cancel()
            answering.cancel()
            del self._answers[number]
            self.channel.send(Kind.OVER, number)

    async def _forward_body(self, number: int, receive: Receive) -> None:
        """Forward a body until its end or its limit, which the main process answers. Return when the client is gone."""
        num_bytes = 0
        while (message := await receive())["type"] != "http.disconnect":
            if num_bytes <= self._limits.max_body_bytes:
                content, has_more = message.get("body", b""), message.get("more_body", False)
                num_bytes += len(content)
                self.channel.send(Kind.BODY if has_more else Kind.LAST_BODY, number, content)

    def _handle(self, frame: Frame) -> None:
        """Handle a frame of the main process. An error ends only the answer it belongs to."""
        if (answer := self._answers.get(frame.number)) is None:
            return  # the client is gone
        try:
            answer.handle(frame)
        except Exception:
            _LOGGER.exception("an answer could not be sent")
            answer.connection.cut_off()

    def _end(self) -> None:
        for answer in self._answers.values():
            answer.connection.cut_off()
        self._on_end()


class _Answer:
    """The answer to one request, which comes in frames."""

    def __init__(self, connection: Connection):
        loop = asyncio.get_running_loop()
        self.connection = connection
        self._head: asyncio.Future[bytes] = loop.create_future()
        self._last: asyncio.Future[bytes] = loop.create_future()
        self._held: list[bytes] = []
        self._write: Callable[[bytes], None] = self._held.append  # until the head has been sent

    def handle(self, frame: Frame) -> None:
        """Handle a frame; parts of the body are written at once."""
        match frame.kind:
            case Kind.PART:
                self._write(frame.content)
            case Kind.HEAD:
                self._head.set_result(frame.content)
            case Kind.END:
                self._last.set_result(frame.content)
            case Kind.CUT:
                self.connection.cut_off()

    async def send(self, send: Send) -> None:
        """Send the head, what has come meanwhile, and the end, when it has come."""
        status, headers = decode_head(await self._head)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self._write = self.connection.write_body
        if self._held:
            self._write(b"".join(self._held))
        await send({"type": "http.response.body", "body": await self._last})


async def _run(listener: socket.socket, channel: socket.socket, limits: Limits) -> None:
    """Serve until the main process closes its end of the channel."""

    def stop() -> None:
        for each in getattr(server, "servers", ()):  # the port is free at once
            each.close()
        server.stop()

    forwarder = _Forwarder(limits, stop)
    server = HttpServer(forwarder, limits)
    await asyncio.get_running_loop().create_unix_connection(lambda: forwarder.channel, sock=channel)
    await server.serve(sockets=[listener])


def _main(listener: str, channel: str, limits: str) -> None:
    with socket.socket(fileno=int(listener)) as accepting, socket.socket(fileno=int(channel)) as talking:
        asyncio.run(_run(accepting, talking, Limits(**json.loads(limits))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
