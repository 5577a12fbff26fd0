"""EngineWorker: a thread that steps an engine, for callers that must not wait, such as a server.

    with EngineWorker(engine) as worker:
        stream = worker.submit(request)
        for event in stream: ...                     # or on_event=..., which the worker's thread calls

Callers only exchange messages with the worker; nothing but its thread touches the engine.
"""

from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from typing import Self

from clearhead.engine.engine import Engine
from clearhead.engine.parallel_runner import LostProcessError
from clearhead.engine.request import Event, Request
from clearhead.engine.statistics import EngineStatistics
from clearhead.errors import ClearheadError

OnEvent = Callable[[Event], None]


class EventStream(Iterator[Event]):
    """The events of one submitted request, up to the one with its finish reason."""

    def __init__(self, abort: Callable[[], None]):
        self.queue: SimpleQueue[Event] = SimpleQueue()
        self.abort = abort  # ends the request after the current step
        self._finished = False

    def __next__(self) -> Event:
        if self._finished:
            raise StopIteration
        event = self.queue.get()
        self._finished = event.finish_reason is not None
        return event


class EngineWorker:
    """A thread that runs the steps of an engine while there is work."""

    def __init__(
        self,
        engine: Engine,
        on_failure: Callable[[LostProcessError], None] | None = None,
        after_step: Callable[[], object] = lambda: None,
    ):
        """Start the thread.

        on_failure: is called in it if it ends because another process of the engine is lost. after_step: is called in
        it when the events of a step have been reported.
        """
        self._engine, self._on_failure, self._after_step = engine, on_failure, after_step
        self._messages: SimpleQueue[Callable[[], None]] = SimpleQueue()  # functions for the worker's thread
        self._listeners: dict[int, OnEvent] = {}
        self._closing = Flag()
        self._lock = Lock()  # no request is submitted after the thread has handled its last message
        self._num_submitted = self._num_handled = 0
        self._thread = Thread(target=self._work, name="clearhead-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, request: Request, on_event: OnEvent | None = None) -> EventStream:
        """Queue a request and return its events. A request that is refused gets one event, with the error.

        on_event: is called for every event, in the worker's thread, instead of filling the stream.
        """
        ids: list[int] = []
        stream = EventStream(lambda: self._messages.put(lambda: self._abort(ids)))
        listener = on_event or stream.queue.put
        with self._lock:
            if self._closing.is_set():
                raise ClearheadError("this engine has been closed; start a new one")
            self._num_submitted += 1
            self._messages.put(lambda: self._add(request, listener, ids))
        return stream

    @property
    def statistics(self) -> EngineStatistics:
        """How busy the engine is. Requests that the worker has not looked at yet count as waiting."""
        num_new = max(self._num_submitted - self._num_handled, 0)
        now = self._engine.statistics
        return now._replace(num_waiting=now.num_waiting + num_new)

    @property
    def is_alive(self) -> bool:
        """Whether the worker's thread is running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Abort all requests and end the thread. Calling it again does nothing."""
        with self._lock:
            self._closing.set()
        self._messages.put(lambda: None)  # wakes the thread
        self._thread.join()

    # --- in the worker's thread

    def _work(self) -> None:
        while not self._closing.is_set():
            self._handle_messages()
            self._report(self._step())
            self._after_step()
        self._handle_messages()
        self._report(self._engine.abort_all())
        self._after_step()

    def _handle_messages(self) -> None:
        """Handle all messages that have arrived; wait for one if the engine has nothing to do."""
        try:
            self._messages.get(block=not self._engine.has_work and not self._closing.is_set())()
            while True:
                self._messages.get_nowait()()
        except Empty:
            return

    def _add(self, request: Request, listener: OnEvent, ids: list[int]) -> None:
        try:
            request_id = self._engine.add(request)
        except Exception as error:  # nothing in a request may end the thread
            name = "" if isinstance(error, ClearheadError) else f"this request failed with {type(error).__name__}: "
            self._tell(listener, Event(-1, finish_reason="error", error=f"{name}{error}"))
        else:
            ids.append(request_id)
            self._listeners[request_id] = listener
        finally:
            self._num_handled += 1

    def _abort(self, ids: list[int]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)

    def _step(self) -> list[Event]:
        """Run a step. An error that no single request has caused ends all of them, and the worker stays usable.

        Without one of its processes, the engine cannot go on, and the thread ends.
        """
        try:
            return self._engine.step() if self._engine.has_work else []
        except LostProcessError as error:
            with self._lock:
                self._closing.set()
            if self._on_failure is not None:
                self._on_failure(error)
            return self._engine.abort_all(str(error))
        except Exception as error:
            return self._engine.abort_all(f"the engine failed with {type(error).__name__}: {error}")

    def _report(self, events: list[Event]) -> None:
        for event in events:
            listener = self._listeners.get(event.request_id)
            if listener is None:
                continue
            if event.finish_reason is not None:
                del self._listeners[event.request_id]
            if not self._tell(listener, event):
                self._listeners.pop(event.request_id, None)
                self._engine.abort(event.request_id)

    def _tell(self, listener: OnEvent, event: Event) -> bool:
        """Report an event and return whether that worked: a caller that has gone away must not end the others."""
        try:
            listener(event)
        except Exception:
            return False
        return True
