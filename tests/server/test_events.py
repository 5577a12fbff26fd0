"""Events on their way from the engine's thread to the requests in the event loop."""

import asyncio
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest

from clearhead.engine import Event
from clearhead.server.events import Dispatcher


class Inbox:
    """A receiver that keeps the tokens of each call."""

    def __init__(self, seconds=0.0):
        self.calls, self.seconds = [], seconds

    def receive(self, arrivals):
        time.sleep(self.seconds)
        self.calls.append([(index, event.token) for index, event, _ in arrivals])


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

        def receive(self, arrivals):
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


class Clock:
    """An event loop and a clock that tests move on."""

    def __init__(self, monkeypatch):
        self.now, self.calls, self.timers = 100.0, deque(), []
        monkeypatch.setattr("clearhead.server.events.time", SimpleNamespace(monotonic=lambda: self.now))

    def call_soon_threadsafe(self, function, *arguments):
        self.calls.append(lambda: function(*arguments))

    def call_later(self, seconds, function):
        self.timers.append((self.now + seconds, function))

    def advance(self, seconds):
        """Let time pass, and call what is due."""
        self.now += seconds
        while self.calls:
            self.calls.popleft()()
        due = [function for at, function in self.timers if at <= self.now]
        self.timers = [(at, function) for at, function in self.timers if at > self.now]
        for function in due:
            function()


def run_steps(clock, dispatcher, inboxes, seconds, count, *, at_once=()):
    """Post a token for each inbox in every step."""
    for token in range(count):
        for inbox in inboxes:
            dispatcher.post(inbox, 0, Event(1, token), at_once=inbox in at_once)
        dispatcher.flush()
        clock.advance(seconds)


@pytest.mark.parametrize(
    ("count", "seconds", "sizes"),
    [
        (4, 0.001, [1] * 12),  # few requests: every step
        (8, 0.008, [1] * 12),  # 6 ms for 8 requests: the steps take longer
        (32, 0.025, [1, 2, 2, 2, 2, 2]),  # 42 ms for 32 requests
        (256, 0.006, [1, 9]),  # 50 ms at most
    ],
)
def test_events_of_many_requests_are_gathered(monkeypatch, count, seconds, sizes):
    clock = Clock(monkeypatch)
    dispatcher, inboxes = Dispatcher(clock), [Inbox() for _ in range(count)]
    run_steps(clock, dispatcher, inboxes, seconds, 12)
    for inbox in inboxes:
        assert [len(call) for call in inbox.calls] == sizes
        tokens = [token for call in inbox.calls for _, token in call]
        assert tokens == list(range(len(tokens)))


def test_gathering_can_be_switched_off(monkeypatch):
    clock = Clock(monkeypatch)
    dispatcher, inboxes = Dispatcher(clock, gather_seconds=0.0), [Inbox() for _ in range(64)]
    run_steps(clock, dispatcher, inboxes, 0.001, 5)
    assert all(len(inbox.calls) == 5 for inbox in inboxes)


def test_what_must_not_wait_is_delivered_with_what_came_before_it(monkeypatch):
    clock = Clock(monkeypatch)
    dispatcher, inboxes = Dispatcher(clock), [Inbox() for _ in range(40)]
    run_steps(clock, dispatcher, inboxes, 0.001, 3)
    assert all(inbox.calls == [[(0, 0)]] for inbox in inboxes)
    assert dispatcher.wait(0)  # nothing that is gathered holds the engine up
    run_steps(clock, dispatcher, inboxes, 0.001, 1, at_once=inboxes[:1])
    assert inboxes[0].calls == [[(0, 0)], [(0, 1), (0, 2), (0, 0)]]
    assert inboxes[1].calls == [[(0, 0)]]


def test_events_do_not_wait_for_the_end_of_a_long_step(monkeypatch):
    clock = Clock(monkeypatch)
    dispatcher, inboxes = Dispatcher(clock), [Inbox() for _ in range(40)]
    run_steps(clock, dispatcher, inboxes, 0.001, 2)
    assert all(inbox.calls == [[(0, 0)]] for inbox in inboxes)
    clock.advance(0.1)  # the third step has not ended yet
    assert all(inbox.calls == [[(0, 0)], [(0, 1)]] for inbox in inboxes)
    run_steps(clock, dispatcher, inboxes, 0.001, 2)  # and the timer works again
    clock.advance(0.1)
    assert all([token for call in inbox.calls for _, token in call] == [0, 1, 0, 1] for inbox in inboxes)
