"""HttpServer: uvicorn with the time limits of a server and without its signal handlers. No torch.

    await HttpServer(app, Limits()).serve(sockets=[listener])

It runs in the main process, or in each HTTP process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from clearhead.server.protocol import limited_protocol
from clearhead.server.settings import Limits

BACKLOG = 2048
_KEEP_ALIVE_SECONDS = 30


class HttpServer(uvicorn.Server):
    """Accepts connections and calls an ASGI application for every request."""

    def __init__(self, app: ASGIApp, limits: Limits):
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,  # running requests have had their time before
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: others handle or ignore them."""
        yield

    def stop(self, cuts_requests: bool = False) -> None:
        """Let `serve` return soon; with cuts_requests, without waiting for the ends of answers."""
        self.should_exit = True
        self.force_exit = cuts_requests
