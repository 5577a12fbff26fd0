"""ServerState: what a server is doing - loading its model, serving, or ending.

state = ServerState(ServerSettings()); state.serve(service); state.require_service().name
"""

import logging
from typing import Literal

from clearhead.server.api_errors import unavailable
from clearhead.server.metrics import Metrics
from clearhead.server.service import Service
from clearhead.server.settings import ServerSettings

_LOGGER = logging.getLogger("clearhead.server")


class ServerState:
    """The phase of a server, and its service once the model is loaded. For the event loop only."""

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.metrics = Metrics()
        self.phase: Literal["loading", "serving", "draining"] = "loading"
        self.service: Service | None = None
        self.num_active = 0  # requests that are being answered

    def serve(self, service: Service) -> None:
        """Answer requests with this service from now on."""
        self.service = service
        if self.phase == "loading":
            self.phase = "serving"

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.phase = "draining"

    def require_service(self) -> Service:
        """Return the service. Raise ApiError with status 503 while there is none, or if its engine has ended."""
        if self.service is None:
            raise unavailable("the model is still being loaded; try again in a few seconds")
        if not self.service.is_alive:
            _LOGGER.error("the thread of the engine has ended")
            raise unavailable("the engine has stopped; the server must be started again", retry_seconds=60)
        return self.service

    def check_serving(self) -> None:
        """Raise ApiError with status 503 if the server is ending."""
        if self.phase == "draining":
            raise unavailable("the server is shutting down")
