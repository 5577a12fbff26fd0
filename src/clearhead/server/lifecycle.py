"""Run a server: listen, load the model, serve until a signal, let running requests finish, end.

    exit_code = run_server(lambda: load("smollm2"), "smollm2", ServerSettings(port=8000), announce)

The port is open while the model loads, so that /health can say so. The first SIGTERM or SIGINT lets running requests
finish for `shutdown_seconds`; a second one ends them.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import uvicorn

from clearhead.api import Model
from clearhead.engine import LostProcessError
from clearhead.errors import ClearheadError
from clearhead.parallel import ProcessGroup, current_launch
from clearhead.server.app import create_app
from clearhead.server.processes import common_memory, load_shard, run_follower
from clearhead.server.protocol import limited_protocol
from clearhead.server.service import Service, Shards
from clearhead.server.settings import ServerSettings
from clearhead.server.state import ServerState

Announce = Callable[[str], None]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_KEEP_ALIVE_SECONDS = 30
_FLUSH_SECONDS = 2.0  # time for ended requests to send their last event
_POLL_SECONDS = 0.02
_BACKLOG = 2048


def run_server(
    load: Callable[[], Model], name: str, settings: ServerSettings, announce: Announce, device: str | None = None
) -> int:
    """Serve a model until a signal arrives. Return the exit code.

    It is 0 if all requests were answered, else 128 plus the number of the signal. Raise ClearheadError if the port is
    taken or the model cannot be loaded. If torchrun has started several processes, `load` must load the whole model to
    the CPU; each process keeps its part of it on `device`, and only the first one listens.
    """
    if not current_launch().is_main:
        return run_follower(load, device)
    with _listen(settings) as listener:
        return asyncio.run(_Run(load, name, settings, announce, device).run(listener))


@contextmanager
def _listen(settings: ServerSettings) -> Iterator[socket.socket]:
    """Open the port. Raise ClearheadError if that is not possible."""
    try:
        (family, kind, number, _, address), *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        raise ClearheadError(f"the host {settings.host!r} is not known; use 127.0.0.1, or 0.0.0.0 for all") from None
    with socket.socket(family, kind, number) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ClearheadError(
                f"port {settings.port} cannot be used on {settings.host}: {reason}; choose another port, or 0 for any "
                "free one"
            ) from None
        listener.setblocking(False)
        yield listener


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `_Run` has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Run:
    """One run of a server."""

    def __init__(
        self, load: Callable[[], Model], name: str, settings: ServerSettings, announce: Announce, device: str | None
    ):
        self._load, self._name, self._settings, self._announce = load, name, settings, announce
        self._device = device
        self._group: ProcessGroup | None = None  # with the other processes, if there are any
        self._state = ServerState(settings)
        self._app = create_app(self._state)
        self._signals: list[int] = []
        self._failure: BaseException | None = None
        self._woken = asyncio.Event()

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal arrives, and return the exit code."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        server = _Server(self._config())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        Thread(target=self._start_service, args=(loop, listener), name="clearhead-loading", daemon=True).start()
        waiting = asyncio.create_task(self._woken.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        were_cut = await self._drain() if self._signals else False
        server.should_exit = True
        server.force_exit = were_cut
        await serving
        if self._state.service is not None:
            self._state.service.close()
        if self._group is not None:
            self._group.close()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if self._failure is not None:
            raise self._failure
        return 128 + self._signals[0] if were_cut else 0

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            http=limited_protocol(self._settings.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the address of a client is not used
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,  # _drain has waited already
        )

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._woken.set()

    # --- the model

    def _start_service(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        """Load the model and start its engine, in a thread of its own."""
        try:
            service = self._create_service(loop)
        except BaseException as error:
            loop.call_soon_threadsafe(self._fail, error)
        else:
            loop.call_soon_threadsafe(self._serve, service, listener.getsockname())

    def _create_service(self, loop: asyncio.AbstractEventLoop) -> Service:
        names = tuple(dict.fromkeys((self._name, *self._settings.aliases)))
        if current_launch().size == 1:
            return Service(self._load(), names, self._settings, self._state.metrics, loop)
        group = self._group = ProcessGroup.start(self._device)

        def on_failure(error: LostProcessError) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        model = load_shard(self._load, group)
        settings = replace(self._settings, memory=common_memory(group, self._settings.memory))
        service = Service(model, names, settings, self._state.metrics, loop, Shards(group, on_failure))
        group.watch(on_failure)
        return service

    def _fail(self, error: BaseException) -> None:
        """End the server because of an error."""
        self._failure = self._failure or error
        self._woken.set()

    def _serve(self, service: Service, address: tuple[str, int]) -> None:
        self._state.serve(service)
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        self._announce(f"serving {self._name} at http://{host}:{address[1]} (Ctrl-C ends the server)")

    # --- the end

    async def _drain(self) -> bool:
        """Wait for running requests, then end those that are left. Return whether there were any."""
        self._state.drain()
        if self._state.num_active:
            seconds = self._settings.shutdown_seconds
            running = "1 request" if self._state.num_active == 1 else f"{self._state.num_active} requests"
            self._announce(f"waiting up to {seconds:g} s for {running}; Ctrl-C ends the wait")
        if await self._wait_until_idle(self._settings.shutdown_seconds):
            return False
        if self._state.service is not None:
            await asyncio.to_thread(self._state.service.close)  # requests get their last event
        await self._wait_until_idle(_FLUSH_SECONDS)
        return True

    async def _wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request is running; give up after some time, or at a further signal."""
        loop = asyncio.get_running_loop()
        deadline, num_signals = loop.time() + seconds, len(self._signals)
        while self._state.num_active and loop.time() < deadline and len(self._signals) == num_signals:
            await asyncio.sleep(_POLL_SECONDS)
        return not self._state.num_active
