"""HttpProcesses: several processes accept connections and speak HTTP, and this one answers their requests.

    await HttpProcesses(app, count=2, limits=Limits()).serve(sockets=[listener])

Each process forwards its requests as frames over a socket (frames.py, http_process.py). Here the same application
answers them that answers requests of its own process: all that a server knows and decides is in the main process. The
tokens of a step leave it in one packet for each process; otherwise each stream costs a packet of its own, for which the
event loop gives the interpreter's lock to the engine's thread and waits to get it back.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict

from starlette.types import ASGIApp, Message, Scope

from clearhead.errors import ClearheadError
from clearhead.server.frames import Frame, FrameChannel, Kind, decode_scope, encode_head
from clearhead.server.http_server import BACKLOG
from clearhead.server.protocol import CONNECTION
from clearhead.server.settings import Limits

_LOGGER = logging.getLogger("clearhead.server")
_FINISH_SECONDS = 1.0  # in which requests end that have failed because the server ends
_END_SECONDS = 5.0  # in which the processes end
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HttpProcesses:
    """The HTTP processes of a server, with the interface of HttpServer."""

    def __init__(self, app: ASGIApp, count: int, limits: Limits):
        self._app, self._count, self._limits = app, count, limits
        self._has_ended = asyncio.Event()
        self._is_stopping = self._cuts_requests = False

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Answer requests until `stop`, and close the listener. Raise ClearheadError if a process ends before."""
        (listener,) = sockets
        listener.listen(BACKLOG)  # clients may connect while the processes start
        processes = []
        try:
            for _ in range(self._count):
                processes.append(_HttpProcess(self._app, listener, self._limits, self._has_ended.set))
                await processes[-1].connect()
            await self._has_ended.wait()
            is_lost = not self._is_stopping
            running = [task for each in processes for task in each.tasks]
            if running and not self._cuts_requests:
                await asyncio.wait(running, timeout=_FINISH_SECONDS)
        finally:
            listener.close()
            for each in processes:
                each.close()
            codes = [await asyncio.to_thread(each.wait) for each in processes]
        if is_lost:
            found = ", ".join(str(code) for code in codes if code) or "0"
            raise ClearheadError(f"an HTTP process of the server has ended (exit code {found}); start the server again")

    def stop(self, cuts_requests: bool = False) -> None:
        """Let `serve` return soon; with cuts_requests, without waiting for the ends of answers."""
        self._is_stopping, self._cuts_requests = True, cuts_requests
        self._has_ended.set()


class _HttpProcess:
    """One of the processes, and the requests that it has forwarded."""

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: Limits, on_end: Callable[[], None]):
        self._app = app
        self._requests: dict[int, _RemoteRequest] = {}
        self.tasks: set[asyncio.Task[None]] = set()  # one for each request
        self._on_end = on_end
        self._channel = FrameChannel(self._handle, self._end)
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = _start(listener, theirs, limits)

    async def connect(self) -> None:
        """Begin to answer requests."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=self._socket)

    def close(self) -> None:
        """End the process by closing the channel, and all requests that are left."""
        self._channel.close()
        for task in self.tasks:
            task.cancel()

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code. This blocks."""
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _handle(self, frame: Frame) -> None:
        if frame.kind == Kind.REQUEST:
            request = self._requests[frame.number] = _RemoteRequest(self._channel, frame.number)
            task = asyncio.create_task(self._answer(request, decode_scope(frame.content)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif frame.number in self._requests:
            self._requests[frame.number].handle(frame)

    async def _answer(self, request: "_RemoteRequest", scope: Scope) -> None:
        scope["state"][CONNECTION] = request
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:
            _LOGGER.exception("a request failed")
        finally:
            del self._requests[request.number]
            request.cut_off()  # if the answer is not complete

    def _end(self) -> None:
        for request in self._requests.values():
            request.handle(Frame(Kind.OVER, request.number, b""))
        self._on_end()


class _RemoteRequest:
    """A request that an HTTP process has forwarded: the connection, and the two functions of ASGI."""

    def __init__(self, channel: FrameChannel, number: int):
        self.number, self._channel = number, channel
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._is_over = asyncio.Event()
        self._content = b""

    def handle(self, frame: Frame) -> None:
        """Handle a frame of the HTTP process."""
        if frame.kind == Kind.OVER:
            self._is_over.set()
            self._messages.put_nowait({"type": "http.disconnect"})
        else:
            has_more = frame.kind == Kind.BODY
            self._messages.put_nowait({"type": "http.request", "body": frame.content, "more_body": has_more})

    async def receive(self) -> Message:
        """Return the next part of the body, or that the client is gone."""
        if self._is_over.is_set():
            return {"type": "http.disconnect"}
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        """Send the head of the answer, or its body. Return from the end of it when the client's buffers have room."""
        if message["type"] == "http.response.start":
            self._channel.send(Kind.HEAD, self.number, encode_head(message["status"], message.get("headers", [])))
            return
        self._content += message.get("body", b"")
        if not message.get("more_body", False):
            self._channel.send(Kind.END, self.number, self._content)
            await self._is_over.wait()

    def write_body(self, content: bytes) -> None:
        """Send a part of the body of the answer that has begun, with all others of this turn of the event loop."""
        self._channel.send(Kind.PART, self.number, content)

    def cut_off(self) -> None:
        """Close the connection without waiting for the client to read."""
        if not self._is_over.is_set():
            self._channel.send(Kind.CUT, self.number)


def _start(listener: socket.socket, channel: socket.socket, limits: Limits) -> "subprocess.Popen[bytes]":
    """Start an HTTP process, which finds the modules that this one finds.

    It leaves signals to this process: it is in a process group of its own, since Ctrl-C reaches all processes of a
    group, and inherits that they are blocked, since service managers send SIGTERM to every process of a server.
    """
    descriptors = (listener.fileno(), channel.fileno())
    arguments = [*map(str, descriptors), json.dumps(asdict(limits))]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "clearhead.server.http_process", *arguments],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=descriptors,
            process_group=0,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
