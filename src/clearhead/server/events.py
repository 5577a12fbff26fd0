"""Bring the engine's events from its thread to the event loop, many with one wakeup.

    dispatcher = Dispatcher(loop); mailbox = Mailbox()
    worker.submit(request, lambda event: dispatcher.post(mailbox, index, event)); items = await mailbox.take()

The engine never waits: posting is an append. A client that reads slowly fills its own mailbox, which its maximum number
of tokens limits.
"""

import asyncio
from collections import deque
from threading import Event as Flag
from threading import Lock

from clearhead.engine import Event


class Mailbox:
    """Events of one HTTP request that have not been read yet, with the index of their text. For the event loop only."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_expired = False

    def put(self, index: int, event: Event) -> None:
        """Add an event."""
        self._items.append((index, event))
        self._wake()

    def expire(self) -> None:
        """Let `take` raise TimeoutError from now on."""
        self._is_expired = True
        self._wake()

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events, and return all that have arrived. Only one task may wait. Raise TimeoutError if expired."""
        if not self._items and not self._is_expired:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._is_expired:
            raise TimeoutError
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Dispatcher:
    """Delivers events to mailboxes in the event loop. `post` may be called in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._items: deque[tuple[Mailbox, int, Event]] = deque()
        self._is_scheduled = False
        self._num_posted = self._num_delivered = 0
        self._lock = Lock()
        self._is_handled = Flag()
        self._is_handled.set()

    def post(self, mailbox: Mailbox, index: int, event: Event) -> None:
        """Deliver an event soon. Raise RuntimeError if the event loop has ended."""
        with self._lock:
            self._items.append((mailbox, index, event))
            self._num_posted += 1
            self._is_handled.clear()
            is_scheduled, self._is_scheduled = self._is_scheduled, True
        if not is_scheduled:  # otherwise the delivery that is to come takes this event, too
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._items:
            mailbox, index, event = self._items.popleft()
            self._num_delivered += 1
            mailbox.put(index, event)
        self._loop.call_soon(self._report, self._num_delivered)  # after the tasks that have just been woken

    def _report(self, num_handled: int) -> None:
        """Let `wait` return, unless an event was posted after the ones that have been handled."""
        with self._lock:
            if num_handled == self._num_posted:
                self._is_handled.set()

    def wait(self, seconds: float) -> bool:
        """Wait until the requests have handled all posted events, or for some time. Return whether they have."""
        return self._is_handled.wait(seconds)
