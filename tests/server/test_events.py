"""Events on their way from the engine's thread to the requests in the event loop."""

import asyncio
import threading
import time
from collections import deque
from types import SimpleNamespace

from clearhead.engine import Event
from clearhead.server.events import Dispatcher


class Inbox:
    """A receiver that keeps the tokens of each call."""

    def __init__(self, seconds=0.0):
        self.calls, self.seconds = [], seconds

    def receive(self, events):
        time.sleep(self.seconds)
        self.calls.append([(index, event.token) for index, event in events])


def test_one_wakeup_delivers_the_events_of_all_requests():
    calls, first, second = [], Inbox(), Inbox()
    dispatcher = Dispatcher(SimpleNamespace(call_soon_threadsafe=calls.append))
    dispatcher.post(first, 0, Event(1, 5))
    dispatcher.post(second, 0, Event(2, 6))
    dispatcher.post(first, 1, Event(3, 7))
    assert not calls  # the step has not ended
    dispatcher.flush()
    dispatcher.post(first, 0, Event(1, 8))  # of the next step, before the event loop has time
    dispatcher.flush()
    assert len(calls) == 1
    calls[0]()
    assert first.calls == [[(0, 5), (1, 7), (0, 8)]]
    assert second.calls == [[(0, 6)]]


def test_nothing_is_delivered_if_nothing_was_posted():
    calls = []
    dispatcher = Dispatcher(SimpleNamespace(call_soon_threadsafe=calls.append))
    dispatcher.flush()
    assert not calls
    assert dispatcher.wait(0)


def test_the_engine_can_wait_until_its_events_have_been_handled():
    def step(dispatcher, inboxes, token):
        for inbox in inboxes:
            dispatcher.post(inbox, 0, Event(1, token))
        dispatcher.flush()
        assert dispatcher.wait(5.0)
        return [len(inbox.calls) for inbox in inboxes]

    async def run():
        dispatcher, inboxes = Dispatcher(asyncio.get_running_loop()), [Inbox(0.01) for _ in range(3)]
        return [await asyncio.to_thread(step, dispatcher, inboxes, token) for token in (1, 2)]

    assert asyncio.run(run()) == [[1] * 3, [2] * 3]


def test_the_engine_also_waits_for_events_that_it_posts_during_a_delivery():
    """After a wait that was too short, the event loop may still be delivering when the next step ends."""
    callbacks, inbox = deque(), Inbox()
    dispatcher = Dispatcher(SimpleNamespace(call_soon_threadsafe=callbacks.append))

    class Late:
        """A receiver during whose call the engine ends another step."""

        def receive(self, events):
            dispatcher.post(inbox, 0, Event(1, 6))
            dispatcher.flush()

    dispatcher.post(Late(), 0, Event(1, 5))
    dispatcher.flush()
    while callbacks:
        assert not dispatcher.wait(0)
        callbacks.popleft()()
    assert dispatcher.wait(0)
    assert inbox.calls == [[(0, 6)]]


def test_the_engine_does_not_wait_longer_than_it_wants():
    """The event loop is busy until the engine's thread goes on, so no event is delivered before."""
    went_on = threading.Event()

    def step(dispatcher):
        dispatcher.post(Inbox(), 0, Event(1, 5))
        dispatcher.flush()
        started = time.monotonic()
        assert not dispatcher.wait(0.02)
        went_on.set()
        return time.monotonic() - started

    async def run():
        waiting = asyncio.get_running_loop().run_in_executor(None, step, Dispatcher(asyncio.get_running_loop()))
        assert went_on.wait(60)
        return await waiting

    assert asyncio.run(run()) >= 0.02


def test_an_event_loop_that_has_ended_does_not_end_the_engine():
    loop = asyncio.new_event_loop()
    loop.close()
    dispatcher = Dispatcher(loop)
    dispatcher.post(Inbox(), 0, Event(1, 5))
    dispatcher.flush()
