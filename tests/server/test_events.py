"""Events on their way from the engine's thread to the tasks of requests."""

import asyncio
import time
from collections import deque
from types import SimpleNamespace

import pytest

from clearhead.engine import Event
from clearhead.server.events import Dispatcher, Mailbox


def test_a_mailbox_gives_all_events_that_have_arrived():
    async def run():
        mailbox = Mailbox()
        mailbox.put(0, Event(1, 5))
        mailbox.put(1, Event(1, 6))
        first = await mailbox.take()
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(0, Event(1, 7))
        mailbox.put(0, Event(1, 8))
        return first, await waiting

    first, second = asyncio.run(run())
    assert [(index, event.token) for index, event in first] == [(0, 5), (1, 6)]
    assert [(index, event.token) for index, event in second] == [(0, 7), (0, 8)]


def test_an_expired_mailbox_ends_the_wait_and_all_later_ones():
    async def run():
        mailbox = Mailbox()
        asyncio.get_running_loop().call_later(0.01, mailbox.expire)
        with pytest.raises(TimeoutError):
            await mailbox.take()
        mailbox.put(0, Event(1, 5))
        with pytest.raises(TimeoutError):
            await mailbox.take()

    asyncio.run(run())


def test_a_cancelled_wait_loses_no_event():
    async def run():
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        waiting.cancel()
        mailbox.put(0, Event(1, 5))
        await asyncio.wait({waiting})
        return await mailbox.take()

    assert [event.token for _, event in asyncio.run(run())] == [5]


def test_the_engine_can_wait_until_the_tasks_have_handled_its_events():
    handled = []

    async def read(mailbox):
        while True:
            for _, event in await mailbox.take():
                time.sleep(0.01)
                handled.append(event.token)

    def step(dispatcher, mailboxes, token):
        for mailbox in mailboxes:
            dispatcher.post(mailbox, 0, Event(1, token))
        dispatcher.wait(5.0)
        return list(handled)

    async def run():
        dispatcher, mailboxes = Dispatcher(asyncio.get_running_loop()), [Mailbox() for _ in range(3)]
        tasks = [asyncio.create_task(read(each)) for each in mailboxes]
        seen = [await asyncio.to_thread(step, dispatcher, mailboxes, token) for token in (1, 2)]
        for task in tasks:
            task.cancel()
        return seen

    assert asyncio.run(run()) == [[1] * 3, [1] * 3 + [2] * 3]


def test_the_engine_also_waits_for_events_that_it_posts_during_a_delivery():
    """The event loop may be quick enough to deliver the first event of a step before the second one is posted."""
    callbacks = deque()
    loop = SimpleNamespace(
        call_soon=lambda *call: callbacks.append(call), call_soon_threadsafe=lambda *call: callbacks.append(call)
    )
    dispatcher, mailbox = Dispatcher(loop), Mailbox()

    def run_next():
        function, *arguments = callbacks.popleft()
        function(*arguments)

    dispatcher.post(mailbox, 0, Event(1, 5))
    run_next()  # delivers the first event
    dispatcher.post(mailbox, 0, Event(1, 6))
    while callbacks:
        assert not dispatcher.wait(0)
        run_next()
    assert dispatcher.wait(0)


def test_the_engine_does_not_wait_longer_than_it_wants():
    def step(dispatcher):
        dispatcher.post(Mailbox(), 0, Event(1, 5))
        started = time.monotonic()
        dispatcher.wait(0.02)
        return time.monotonic() - started

    async def run():
        waiting = asyncio.get_running_loop().run_in_executor(None, step, Dispatcher(asyncio.get_running_loop()))
        time.sleep(0.5)  # the event loop is busy
        return await waiting

    assert 0.02 <= asyncio.run(run()) < 0.4
