"""SharedEngine: one engine for callers in several threads, without a thread of its own.

    shared = SharedEngine(engine); request_id = shared.add(request)
    for event in shared.events([request_id]): ...

Whoever waits for a token runs the next step, for all requests. Requests of different threads therefore share their
steps, and an exception such as KeyboardInterrupt is raised in the thread that it belongs to.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from threading import Lock

from clearhead.engine.engine import Engine
from clearhead.engine.request import Event, Request


class SharedEngine:
    """An engine, a lock, and the events that their callers have not fetched yet."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.lock = Lock()
        self.inboxes: dict[int, deque[Event]] = {}

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raise ClearheadError if it is invalid or can never fit."""
        with self.lock:
            request_id = self.engine.add(request)
            self.inboxes[request_id] = deque()
            return request_id

    def discard(self, request_ids: Iterable[int]) -> None:
        """Abort requests that are not finished, and forget the events of all of them."""
        with self.lock:
            for request_id in request_ids:
                self.engine.abort(request_id)
                self.inboxes.pop(request_id, None)

    def events(self, request_ids: Iterable[int]) -> Iterator[list[Event]]:
        """Yield the new events of these requests, in lists that are not empty, until all have finished.

        Run a step whenever there are none. Discarded requests count as finished.
        """
        unfinished = set(request_ids)
        while unfinished := {each for each in unfinished if each in self.inboxes}:
            if events := self._next_events(unfinished):
                yield events
                unfinished -= {event.request_id for event in events if event.finish_reason is not None}

    def _next_events(self, request_ids: Iterable[int]) -> list[Event]:
        """Return the events of these requests that have arrived. If there are none, run a step first."""
        with self.lock:
            if not any(self.inboxes.get(request_id) for request_id in request_ids):
                for event in self.engine.step():
                    if event.request_id in self.inboxes:  # otherwise it was discarded
                        self.inboxes[event.request_id].append(event)
            inboxes = [self.inboxes[request_id] for request_id in request_ids if request_id in self.inboxes]
            events = [event for inbox in inboxes for event in inbox]
            for inbox in inboxes:
                inbox.clear()
            return events
