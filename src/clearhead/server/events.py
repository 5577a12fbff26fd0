"""Bring the engine's events from its thread to the event loop, many with one wakeup.

    dispatcher = Dispatcher(loop); mailbox = Mailbox()
    worker.submit(request, lambda event: dispatcher.post(mailbox, index, event)); items = await mailbox.take()

The engine never waits: posting is an append. A client that reads slowly fills its own mailbox, which its maximum number
of tokens limits.
"""

import asyncio
from collections import deque

from clearhead.engine import Event


class Mailbox:
    """Events of one HTTP request that have not been read yet, with the index of their text. For the event loop only."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()

    def put(self, index: int, event: Event) -> None:
        """Add an event."""
        self._items.append((index, event))
        self._arrived.set()

    async def take(self) -> list[tuple[int, Event]]:
        """Wait for events, and return all that have arrived."""
        await self._arrived.wait()
        self._arrived.clear()
        items, self._items = self._items, []
        return items


class Dispatcher:
    """Delivers events to mailboxes in the event loop. `post` may be called in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._items: deque[tuple[Mailbox, int, Event]] = deque()
        self._is_scheduled = False

    def post(self, mailbox: Mailbox, index: int, event: Event) -> None:
        """Deliver an event soon. Raise RuntimeError if the event loop has ended."""
        self._items.append((mailbox, index, event))
        if not self._is_scheduled:  # otherwise the delivery that is to come takes this event, too
            self._is_scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._items:
            mailbox, index, event = self._items.popleft()
            mailbox.put(index, event)
