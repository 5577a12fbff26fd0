"""Callers in other threads: the worker's thread, and threads that share an engine."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import pytest

from clearhead.engine import EngineWorker, Request, SharedEngine
from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions
from tests.engine.test_engine import requests
from tests.engine.toys import check_no_page_is_lost, plain_tokens, toy_engine
from tests.model.toys import decoder, toy


@pytest.fixture
def engine():
    return toy_engine(toy(decoder()), num_pages=40, max_tokens=32, max_sequences=8)


def test_the_worker_serves_many_callers(engine):
    asked = requests(3, 8, 5, 12, 7, 4)
    with EngineWorker(engine) as worker:
        streams = [worker.submit(request) for request in asked]
        found = [[event.token for event in stream] for stream in streams]
    assert found == [plain_tokens(engine.network, request) for request in asked]
    check_no_page_is_lost(engine)


def test_after_each_step_the_worker_calls_a_function_when_the_events_are_reported(engine):
    tokens, counts = [], []
    with EngineWorker(engine, after_step=lambda: counts.append((len(tokens), current_thread().name))) as worker:
        worker.submit(requests(3, max_new_tokens=4)[0], lambda event: tokens.append(event.token))
        while len(tokens) < 4:
            time.sleep(0.001)
    assert [count for count, _ in counts if count][:4] == [1, 2, 3, 4]
    assert {name for _, name in counts} == {"clearhead-engine"}


def test_an_aborted_stream_ends(engine):
    with EngineWorker(engine) as worker:
        stream = worker.submit(requests(3, max_new_tokens=100)[0])
        assert next(stream).finish_reason is None
        stream.abort()
        assert list(stream)[-1].finish_reason == "aborted"
    check_no_page_is_lost(engine)


def test_a_refused_request_gets_one_error_event(engine):
    with EngineWorker(engine) as worker:
        (event,) = worker.submit(Request(prompt=[], options=SamplingOptions()))
        assert event.error == "the text is empty; give at least one token"
        assert len(list(worker.submit(requests(3)[0]))) == 6


def test_close_ends_what_is_running(engine):
    worker = EngineWorker(engine)
    stream = worker.submit(requests(3, max_new_tokens=100)[0])
    next(stream)
    worker.close()
    assert list(stream)[-1].finish_reason == "aborted"
    check_no_page_is_lost(engine)
    with pytest.raises(ClearheadError, match="closed"):
        worker.submit(requests(3)[0])
    worker.close()


def test_a_listener_that_raises_ends_its_own_request_only(engine):
    def listener(event):
        raise RuntimeError("this caller has gone away")

    (asked,) = requests(3)
    with EngineWorker(engine) as worker:
        worker.submit(asked, listener)
        assert [event.token for event in worker.submit(asked)] == plain_tokens(engine.network, asked)
    check_no_page_is_lost(engine)


def test_an_error_of_the_engine_ends_all_requests_and_the_worker_stays_usable(engine, monkeypatch):
    (asked,) = requests(3)
    with EngineWorker(engine) as worker:
        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
            (event,) = worker.submit(asked)
            assert event.error == "the engine failed with ZeroDivisionError: division by zero"
        assert [event.token for event in worker.submit(asked)] == plain_tokens(engine.network, asked)


def test_threads_share_the_steps_of_an_engine(engine):
    shared, asked = SharedEngine(engine), requests(3, 8, 5, 12, 7, 4, 9, 6)

    def tokens_of(request):
        request_id = shared.add(request)
        return [event.token for events in shared.events([request_id]) for event in events]

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(tokens_of, asked))
    assert found == [plain_tokens(engine.network, request) for request in asked]
    check_no_page_is_lost(engine)


def test_discarded_requests_release_their_pages(engine):
    shared = SharedEngine(engine)
    first, second = (shared.add(request) for request in requests(3, 5, max_new_tokens=50))
    events = shared.events([first, second])
    next(events)
    shared.discard([first, second])
    assert list(events) == []
    while engine.has_work:
        engine.step()
    check_no_page_is_lost(engine)
