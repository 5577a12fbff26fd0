"""Backpressure, clients that go away, time limits, health (A18, A19, R17, R19 to R21)."""

import json
import socket
import threading
import time

import httpx2
import pytest

from clearhead.server import Limits
from clearhead.server.admission import Admission
from clearhead.server.api_errors import ApiError
from tests.server.toys import LETTERS, serve, toy_model

LONG = {"prompt": "Hello", "max_tokens": 3000, "logit_bias": LETTERS}

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def busy():
    """A server with few places and a long context."""
    with serve(toy_model(context=4096), max_concurrent=2, max_queued=2) as running:
        yield running
        running.wait_until_idle()


def start_requests(server, count, **fields):
    """Send requests over sockets without reading their answers; return the sockets."""
    sockets = []
    for _ in range(count):
        body = json.dumps({**LONG, **fields}).encode()
        connection = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        sockets.append(connection)
    return sockets


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_a_full_queue_answers_429_at_once(busy):
    sockets = start_requests(busy, 4)
    wait_for(lambda: busy.service.admission.num_texts == 4)
    answer = busy.post("/v1/completions", LONG)
    assert busy.service.admission.num_texts == 4  # it waited for none of the others
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert answer.json()["error"]["code"] == "queue_full"
    assert busy.get("/health").status_code == 200
    for each in sockets:
        each.close()
    busy.wait_until_idle()
    assert busy.text(max_tokens=2)


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away_free_their_places(busy, stream):
    num_tokens = busy.service.statistics.num_generated_tokens
    for _ in range(3):
        sockets = start_requests(busy, 4, stream=stream)  # two running, two waiting
        wait_for(lambda: busy.service.admission.num_texts == 4)
        for each in sockets:
            each.close()
        busy.wait_until_idle()
    assert busy.service.statistics.num_generated_tokens - num_tokens < 4 * LONG["max_tokens"]  # a third of all


def test_a_request_with_more_texts_than_places_is_a_bad_request(busy):
    answer = busy.post("/v1/completions", {**LONG, "n": 5})
    assert answer.status_code == 400
    assert "at most 4" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off_and_holds_nothing_up():
    limits = Limits(write_seconds=0.5)
    with serve(toy_model(context=8192), limits=limits, max_concurrent=2) as server:
        fields = {"stream": True, "n": 2, "max_tokens": 8000, "logprobs": 20}  # more than the buffers hold
        (connection,) = start_requests(server, 1, **fields)
        wait_for(lambda: server.service.admission.num_texts == 2)
        wait_for(lambda: server.service.admission.num_texts == 0, seconds=60)
        server.wait_until_idle()
        connection.close()


@pytest.mark.slow
def test_a_client_that_reads_late_holds_no_step_and_gets_everything():
    with serve(toy_model(context=4096), max_concurrent=3) as server, socket.socket() as connection:
        text = server.text(**LONG, temperature=0)
        before = server.service.statistics.num_generated_tokens
        body = json.dumps({**LONG, "n": 3, "stream": True, "logprobs": 20, "temperature": 0}).encode()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that buffers do not hold the whole stream
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: server.service.statistics.num_generated_tokens - before == 3 * LONG["max_tokens"])
        assert server.service.admission.num_requests == 1  # the last event is not sent yet
        connection.settimeout(60)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        lines = [line for line in received.decode().splitlines() if line.startswith("data: {")]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        for index in range(3):
            assert "".join(choice["text"] for choice in choices if choice["index"] == index) == text
        server.wait_until_idle()


def test_an_old_client_gets_a_stream_without_chunks():
    with (
        serve(toy_model()) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection,
    ):
        body = json.dumps({**LONG, "max_tokens": 5, "stream": True}).encode()
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
        connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.settimeout(60)
        received = b""
        while data := connection.recv(1 << 16):
            received += data
        events = received.partition(b"\r\n\r\n")[2].split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
        assert len(events) == 5 + 2


def test_slow_headers_and_bodies_end():
    with serve(toy_model(), limits=Limits(header_seconds=0.3)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(sent)
                connection.settimeout(60)
                assert connection.recv(1000) == b""
        server.wait_until_idle()
    with serve(toy_model(), limits=Limits(body_seconds=0.3)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
            connection.settimeout(60)
            assert b" 408 " in connection.recv(1000)
        server.wait_until_idle()


def test_a_request_that_takes_too_long_ends():
    with serve(toy_model(context=8192), limits=Limits(request_seconds=0.3)) as server:
        answer = server.post("/v1/completions", {**LONG, "max_tokens": 8000})
        assert answer.status_code == 504
        events = server.post("/v1/completions", {**LONG, "max_tokens": 8000, "stream": True}).text
        assert json.loads(events.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        server.wait_until_idle()


def test_health_is_503_until_the_model_is_loaded_and_after_the_engine_ended():
    with serve(toy_model(), loads=False) as server:
        for path in ("/health", "/v1/models"):
            answer = server.get(path)
            assert answer.status_code == 503
            assert "retry-after" in answer.headers
        assert server.post("/v1/completions", LONG).status_code == 503
        assert server.get("/version").status_code == 200
        assert server.get("/metrics").status_code == 200
    with serve(toy_model()) as server:
        assert server.get("/health").json() == {"status": "ok"}
        server.service.worker.close()
        assert server.get("/health").status_code == 503
        assert server.post("/v1/completions", LONG).status_code == 503


def test_a_draining_server_refuses_new_requests_and_finishes_running_ones(busy):
    answers = []
    with httpx2.Client(base_url=busy.url, timeout=60) as client:
        body = {**LONG, "max_tokens": 300}
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
        thread.start()
        wait_for(lambda: busy.service.admission.num_texts == 1)
        busy.state.phase = "draining"
        try:
            assert busy.post("/v1/completions", LONG).status_code == 503
            assert busy.get("/health").status_code == 503
            thread.join()
        finally:
            busy.state.phase = "serving"
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 300


def test_admission_counts_requests_texts_and_tokens():
    admission = Admission(max_concurrent=2, max_queued=1, max_tokens=100)
    with admission.request() as first, admission.request() as second:
        first.enter(2, 90)
        with pytest.raises(ApiError) as caught:
            second.enter(2, 1)
        assert caught.value.status == 429
        with pytest.raises(ApiError) as caught:
            second.enter(1, 20)
        assert caught.value.status == 429
        second.enter(1, 10)
        with admission.request(), pytest.raises(ApiError), admission.request():
            pass
    assert (admission.num_requests, admission.num_texts, admission.num_tokens) == (0, 0, 0)
    with admission.request() as alone:
        alone.enter(1, 1000)  # one that could never enter otherwise
