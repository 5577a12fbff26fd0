"""The HTTP protocol of uvicorn with time limits for headers and for clients that do not read, and with direct writing.

config = uvicorn.Config(app, http=limited_protocol(Limits()))
"""

import asyncio
from typing import Any, Protocol

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from clearhead.server.settings import Limits

CONNECTION = "clearhead.connection"  # in the state of an ASGI scope: the connection of the request


class Connection(Protocol):
    """What routes can do with a connection besides ASGI's `send`."""

    def write_body(self, content: bytes) -> None:
        """Send a part of the body of the answer that has begun, at once."""

    def cut_off(self) -> None:
        """Close the connection without waiting for the client to read."""


def limited_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Return a protocol class with these limits."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits})


class LimitedProtocol(H11Protocol):
    """One connection.

    The time for headers counts from its start, or from the first byte of a further request; the time for reading
    counts while more of an answer is unread than fits into the buffers.
    """

    limits: Limits

    def __init__(
        self,
        config: Config,
        server_state: UvicornState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self}, _loop)
        self.header_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer for headers."""
        super().connection_made(transport)
        self.watch_headers()

    def data_received(self, data: bytes) -> None:
        """Read data; complete headers stop the timer."""
        super().data_received(data)
        self.watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self.stop_header_timer()
        self.stop_write_timer()
        super().connection_lost(exc)

    def watch_headers(self) -> None:
        """Let the timer run while headers are incomplete."""
        if self.conn.their_state is not h11.IDLE:
            self.stop_header_timer()
        elif self.header_timer is None:
            self.header_timer = self.loop.call_later(self.limits.header_seconds, self.cut_off)

    def stop_header_timer(self) -> None:
        """Stop the timer for headers."""
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None

    def pause_writing(self) -> None:
        """Start the timer for reading: the buffers are full."""
        super().pause_writing()
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.limits.write_seconds, self.cut_off)

    def resume_writing(self) -> None:
        """Stop the timer for reading."""
        self.stop_write_timer()
        super().resume_writing()

    def stop_write_timer(self) -> None:
        """Stop the timer for reading."""
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def write_body(self, content: bytes) -> None:
        """Send a part of the body of the answer that has begun, at once.

        ASGI's `send` must be awaited, so it needs a task that is woken for every token of every stream. What a slow
        client does not read is kept by the transport.
        """
        assert self.conn.our_state is h11.SEND_BODY, "the head of the answer must be sent first"
        if not self.transport.is_closing():
            self.transport.write(chunk_of_body(content, self.conn.their_http_version))

    def cut_off(self) -> None:
        """Close the connection without waiting for the client to read."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.abort()


def chunk_of_body(content: bytes, http_version: bytes | None) -> bytes:
    """Return what h11 sends for a part, not empty, of a body of unknown length: before HTTP 1.1 there are no chunks."""
    if http_version is None or http_version < b"1.1":
        return content
    return b"%x\r\n%b\r\n" % (len(content), content)
