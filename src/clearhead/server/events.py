"""Bring the engine's events from its thread to the event loop, those of a whole step with one wakeup.

    dispatcher = Dispatcher(loop)
    worker.submit(request, lambda event: dispatcher.post(job, index, event)); dispatcher.flush()   # after each step

The engine never waits for a client: posting is an append. In the event loop, one callback hands the events of all
requests on, without a task that would have to be woken for each of them.

Sending a server-sent event costs the event loop about as much for ten tokens as for one, some 30 us, and the client
again. So with many requests the events of each are gathered over some steps. First tokens and ends do not wait.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event as Flag
from threading import Lock
from typing import Protocol

from clearhead.engine import Event

Arrival = tuple[int, Event, float]  # the index of a text, what happened to it, and when (time.monotonic)
_NUM_PROMPTLY_SERVED = 4  # requests; with so many, every event is delivered after its step
# For each further request, events are gathered this much longer, so that sending takes some 2 % of a processor: a CPU
# that generates 32 texts of SmolLM2 then sends after every second step of 25 ms, one with 8 after every step.
_SECONDS_PER_REQUEST = 0.0015


class Receiver(Protocol):
    """What gets the events of one HTTP request. It must not raise an exception."""

    def receive(self, arrivals: Sequence[Arrival]) -> None:
        """Handle all events that have arrived since the last call."""


_Batch = dict[Receiver, list[Arrival]]


class Dispatcher:
    """Delivers events in the event loop. `post` and `flush` are for one other thread, that of the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gather_seconds: float = 0.05):
        """Begin without events.

        gather_seconds: for how long events are gathered at most, or for twice as long while a step takes longer.
        """
        self._loop, self._gather_seconds = loop, gather_seconds
        self._lock = Lock()  # of what follows
        self._gathered: _Batch = {}  # not flushed yet
        self._hurried: set[Receiver] = set()  # those of them that do not wait for others
        self._ready: _Batch = {}  # flushed, to be delivered
        self._all_flushed_at = 0.0  # when everything was flushed the last time
        self._is_scheduled = self._is_timed = False
        self._is_delivered = Flag()
        self._is_delivered.set()

    def post(self, receiver: Receiver, index: int, event: Event, *, at_once: bool = True) -> None:
        """Keep an event for the next `flush`, or, unless at_once, for a later one."""
        with self._lock:
            self._gathered.setdefault(receiver, []).append((index, event, time.monotonic()))
            if at_once:
                self._hurried.add(receiver)

    def flush(self) -> None:
        """Deliver events soon: all that have been gathered long enough, or only those of requests that do not wait.

        If the event loop has ended, nobody waits for them any more.
        """
        with self._lock:
            if not self._gathered:
                return
            if time.monotonic() - self._all_flushed_at >= self._patience():
                self._flush_all()
            else:
                self._make_ready({receiver: self._gathered.pop(receiver) for receiver in self._hurried})
                self._hurried.clear()
            needs_delivery = bool(self._ready) and not self._is_scheduled  # else the one to come takes these, too
            needs_timer = bool(self._gathered) and not self._is_timed
            self._is_scheduled |= needs_delivery
            self._is_timed |= needs_timer
        with suppress(RuntimeError):
            if needs_delivery:
                self._loop.call_soon_threadsafe(self._deliver)
            if needs_timer:
                self._loop.call_soon_threadsafe(self._deliver_if_late)

    def _patience(self) -> float:
        """Return for how many seconds to gather events."""
        num_requests = len(self._gathered) - _NUM_PROMPTLY_SERVED
        return min(max(num_requests, 0) * _SECONDS_PER_REQUEST, self._gather_seconds)

    def _flush_all(self) -> None:
        self._make_ready(self._gathered)
        self._gathered, self._all_flushed_at = {}, time.monotonic()
        self._hurried.clear()

    def _make_ready(self, batch: _Batch) -> None:
        for receiver, arrivals in batch.items():
            self._ready.setdefault(receiver, []).extend(arrivals)
        if self._ready:
            self._is_delivered.clear()

    def _deliver_if_late(self) -> None:
        """Deliver what the end of a long step would deliver too late; look again when that may be the case."""
        with self._lock:
            seconds = self._all_flushed_at + 2 * self._gather_seconds - time.monotonic()
            if self._gathered and seconds > 0:
                self._loop.call_later(seconds, self._deliver_if_late)
                return
            self._is_timed = False
            self._flush_all()
        self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            self._is_scheduled = False
            batch, self._ready = self._ready, {}
        for receiver, arrivals in batch.items():
            receiver.receive(arrivals)
        with self._lock:
            if not self._ready:  # otherwise a delivery that is scheduled takes the rest
                self._is_delivered.set()

    def wait(self, seconds: float) -> bool:
        """Wait until all flushed events have been delivered, or for some time. Return whether they have."""
        return self._is_delivered.wait(seconds)
