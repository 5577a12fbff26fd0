"""Service: a loaded model with its engine, its queue and its measurements; everything that the routes need.

service = Service(model, ("smollm2",), ServerSettings(), Metrics(), loop); service.max_length
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol, TypeVar

from clearhead.api import Model, RecurrentBaseline
from clearhead.engine import (
    Channel,
    EngineStatistics,
    EngineWorker,
    Event,
    LostProcessError,
    Request,
    unsupported_by_engine,
)
from clearhead.errors import ClearheadError, unknown_name
from clearhead.generation import require_tokenizer
from clearhead.options import SamplingOptions
from clearhead.server.admission import Admission
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.events import Dispatcher
from clearhead.server.metrics import Metrics
from clearhead.server.sequential_worker import SequentialWorker
from clearhead.server.settings import ServerSettings
from clearhead.server.structured_output import Grammars
from clearhead.server.threads import run_apart
from clearhead.tokenization import Tokenizer

T = TypeVar("T")
_MAX_CONCURRENT = {"cuda": 256, "cpu": 32}  # more texts at once only make each of them slower
_NUM_PREPARING_THREADS = 4
# On a CPU, the next step begins when the tokens of the last one have been sent, or after this time. Otherwise sending
# interrupts one of the kernels' threads, and all others wait for that one.
_SEND_SECONDS = 0.01


class TextStream(Protocol):
    """A text that was submitted."""

    def abort(self) -> None: ...


class _Worker(Protocol):
    """What EngineWorker and SequentialWorker have in common."""

    @property
    def statistics(self) -> EngineStatistics: ...

    @property
    def is_alive(self) -> bool: ...

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> TextStream: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Shards:
    """The other processes of a server; on_failure is called, in any thread, if one of them is lost."""

    channel: Channel
    on_failure: Callable[[LostProcessError], None]


class Service:
    """A model that is being served. Its methods are for the event loop, unless they say otherwise."""

    def __init__(
        self,
        model: Model,
        names: tuple[str, ...],
        settings: ServerSettings,
        metrics: Metrics,
        loop: asyncio.AbstractEventLoop,
        shards: Shards | None = None,
    ):
        """Create the engine and try it. This takes seconds, so call it in a thread beside the event loop.

        shards: the other processes that hold parts of the network; None: there are none.
        """
        if isinstance(model, RecurrentBaseline):
            raise ClearheadError("a recurrent network cannot be served; clearhead generate runs it")
        if model.config.reads_audio:
            raise ClearheadError("a model that reads audio cannot be served; clearhead transcribe runs it")
        self.model, self.names, self.settings, self.metrics = model, names, settings, metrics
        self.created = int(time.time())
        self._shards = shards
        self.dispatcher = Dispatcher(loop, settings.gather_seconds)
        self.max_concurrent = settings.max_concurrent or _MAX_CONCURRENT.get(model.device.type, _MAX_CONCURRENT["cpu"])
        self.max_length = model.config.context
        self.worker = self._start_worker()
        self.admission = Admission(self.max_concurrent, settings.max_queued, settings.max_queued_tokens)
        self.grammars = Grammars(model)
        self.fingerprint = _fingerprint(model, names[0])
        self._preparing = ThreadPoolExecutor(_NUM_PREPARING_THREADS, thread_name_prefix="clearhead-prepare")
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="clearhead-compute")
        if self.worker is not None:
            metrics.watch_engine(lambda: self.statistics)

    # --- the model

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.names[0]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError with status 404 unless this is a name of the model, or None."""
        if name is not None and name not in self.names:
            message = str(unknown_name("model", name, self.names))
            raise ApiError(404, message, type="not_found_error", code="model_not_found", param="model")

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raise ClearheadError if it has none."""
        return require_tokenizer(self.model.tokenizer)

    @property
    def generates(self) -> bool:
        """Whether the model generates texts; an encoder only embeds them."""
        return self.worker is not None

    @property
    def is_alive(self) -> bool:
        """Whether the thread that generates is running."""
        return self.worker is None or self.worker.is_alive

    @property
    def statistics(self) -> EngineStatistics:
        """How busy the engine is. This may be called in any thread."""
        assert self.worker is not None
        return self.worker.statistics

    # --- work

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> TextStream:
        """Queue a request; `on_event` is called in the engine's thread."""
        if self.worker is None:
            raise ClearheadError("this model has only an encoder, so it cannot generate texts; use /v1/embeddings")
        return self.worker.submit(request, on_event)

    async def prepare(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that reads texts (JSON, tokenizer, template) in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._preparing, function, *arguments)

    async def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that uses the network in a thread beside the engine, one after another.

        Raise ApiError if the network is divided among processes, which run only the steps of the engine.
        """
        if self._shards is not None:
            raise invalid("several processes share this model, so it only generates texts; serve it in one process")
        return await asyncio.get_running_loop().run_in_executor(self._computing, run_apart, function, *arguments)

    def close(self) -> None:
        """End the threads; what is still running is aborted."""
        if self.worker is not None:
            self.worker.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._computing.shutdown(wait=False, cancel_futures=True)

    # --- creation

    def _start_worker(self) -> _Worker | None:
        config = self.model.config
        if config.decoder is None or config.head is None:
            return None
        if reason := unsupported_by_engine(config):
            if self._shards is not None:
                raise ClearheadError(f"several processes cannot serve this model: {reason}; serve it in one process")
            self.max_concurrent = 1
            return SequentialWorker(self.model.text_generator, self.dispatcher.flush)
        engine = self.model.engine(
            memory=self.settings.memory,
            max_sequences=self.max_concurrent,
            deterministic=self.settings.deterministic or None,  # None: where it costs nothing
            channel=None if self._shards is None else self._shards.channel,
        )
        lengths = (self.max_length, engine.capacity, engine.executor.max_length)
        self.max_length = min(length for length in lengths if length is not None)
        list(engine.run([_trial_request(self.model)]))  # so that the first client does not wait for preparations
        engine.forget_prefixes()
        on_failure = None if self._shards is None else self._shards.on_failure
        return EngineWorker(engine, on_failure, self._send_events)

    def _send_events(self) -> None:
        """Send the events of a step; on a CPU, wait for that."""
        self.dispatcher.flush()
        if self.model.device.type == "cpu":
            self.dispatcher.wait(_SEND_SECONDS)


def _trial_request(model: Model) -> Request:
    """Return a request for two tokens."""
    sequence = model.text_generator.create_sequence([0], SamplingOptions(max_new_tokens=2))
    return Request(prompt=sequence.prompt, options=sequence.options, source=sequence.source)


def _fingerprint(model: Model, name: str) -> str:
    """Return a name for everything that answers depend on besides the request."""
    parts = (version("clearhead"), name, repr(model), str(model.config))
    return f"fp_{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
