"""Bring the engine's events from its thread to the event loop, those of a whole step with one wakeup.

    dispatcher = Dispatcher(loop)
    worker.submit(request, lambda event: dispatcher.post(job, index, event)); dispatcher.flush()   # after each step

The engine never waits for a client: posting is an append. In the event loop, one callback hands the events of all
requests on, without a task that would have to be woken for each of them.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Lock
from typing import Protocol

from clearhead.engine import Event


class Receiver(Protocol):
    """What gets the events of one HTTP request, each with the index of its text. It must not raise an exception."""

    def receive(self, events: Sequence[tuple[int, Event]]) -> None:
        """Handle all events that have arrived since the last call."""


class Dispatcher:
    """Delivers events in the event loop. `post` and `flush` are for one other thread, that of the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._items: deque[tuple[Receiver, int, Event]] = deque()
        self._lock = Lock()  # of what follows
        self._is_scheduled = False
        self._is_delivered = Flag()
        self._is_delivered.set()

    def post(self, receiver: Receiver, index: int, event: Event) -> None:
        """Keep an event for the next `flush`."""
        self._items.append((receiver, index, event))

    def flush(self) -> None:
        """Deliver all events soon. If the event loop has ended, nobody waits for them any more."""
        with self._lock:
            if not self._items:
                return
            self._is_delivered.clear()
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        if not is_scheduled:  # otherwise the delivery that is to come takes these events, too
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            self._is_scheduled = False
        batches: dict[Receiver, list[tuple[int, Event]]] = {}
        for _ in range(len(self._items)):
            receiver, index, event = self._items.popleft()
            batches.setdefault(receiver, []).append((index, event))
        for receiver, events in batches.items():
            receiver.receive(events)
        with self._lock:
            if not self._items:  # otherwise a flush that is to come, or has come already, delivers the rest
                self._is_delivered.set()

    def wait(self, seconds: float) -> bool:
        """Wait until all flushed events have been delivered, or for some time. Return whether they have."""
        return self._is_delivered.wait(seconds)
