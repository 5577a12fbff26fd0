"""The HTTP protocol of uvicorn with a time limit for headers, and a way to cut off clients that do not read.

config = uvicorn.Config(app, http=limited_protocol(Limits()))
"""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState as UvicornState

from clearhead.server.settings import Limits

CUT_OFF = "clearhead.cut_off"  # in the state of an ASGI scope: a function that closes the connection at once


def limited_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Return a protocol class with these limits."""

    class LimitedProtocol(H11Protocol):
        """One connection. The time for headers counts from its start, or from the first byte of a further request."""

        def __init__(
            self,
            config: Config,
            server_state: UvicornState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, {**app_state, CUT_OFF: self.cut_off}, _loop)
            self.header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Start the timer for headers."""
            super().connection_made(transport)
            self.watch_headers()

        def data_received(self, data: bytes) -> None:
            """Read data; complete headers stop the timer."""
            super().data_received(data)
            self.watch_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the timer."""
            self.stop_timer()
            super().connection_lost(exc)

        def watch_headers(self) -> None:
            """Let the timer run while headers are incomplete."""
            if self.conn.their_state is not h11.IDLE:
                self.stop_timer()
            elif self.header_timer is None:
                self.header_timer = self.loop.call_later(limits.header_seconds, self.cut_off)

        def stop_timer(self) -> None:
            """Stop the timer."""
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def cut_off(self) -> None:
            """Close the connection without waiting for the client to read."""
            if self.transport is not None and not self.transport.is_closing():
                self.transport.abort()

    return LimitedProtocol
