"""Requests that are refused before they are parsed: they end where h11 says, and get the answer of the usual way."""

import json
import socket
from types import SimpleNamespace

import h11
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from clearhead.server import Limits, ServerSettings, ServerState
from clearhead.server.admission import Admission
from clearhead.server.quick_refusal import refuse_quickly
from tests.server.test_load import HEAD, LONG, start_requests, wait_for
from tests.server.toys import serve, toy_model

VARYING = {"date", "x-request-id", "openai-processing-ms"}
BODY = b'{"prompt": "a"}'
REQUEST = HEAD + b"Content-Length: 15\r\n\r\n" + BODY
NAMES = ["Content-Length", "content-length ", "Connection", "Transfer-Encoding", "Expect", "Host", "Origin", "X", " Y"]
VALUES = ["15", "3", "0", " 15\t", "+3", "15, 15", "close", "Keep-Alive", "chunked", "localhost", "evil.example", ""]
header_lines = st.tuples(st.sampled_from(NAMES), st.sampled_from([":", ": ", " :"]), st.sampled_from(VALUES))
line_ends = st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n ", "\r\n\t"])


def full_state(**settings):
    """Return the state of a server that has no room."""
    state = ServerState(ServerSettings(**settings))
    admission = Admission(max_concurrent=1, max_queued=0, max_tokens=100)
    admission.num_requests = 1
    state.service, state.phase = SimpleNamespace(admission=admission, is_alive=True), "serving"
    return state


@given(st.lists(st.tuples(header_lines, line_ends), max_size=5), st.sampled_from(["\r\n", "\n"]), st.booleans())
@example([(("X", ":", "1"), "\n"), (("Content-Length", ":", "3"), "\n")], "\r\n", True)
def test_a_refused_request_ends_where_h11_says(lines, end, usual):
    start = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + ("Content-Length: 15\r\n" if usual else "")
    head = start + "".join("".join(header) + line_end for header, line_end in lines) + end
    data = head.encode() + BODY + REQUEST
    refused = refuse_quickly(full_state(), data, [])
    if refused is None:
        return
    server = h11.Connection(h11.SERVER)
    server.receive_data(data)
    request, num_bytes = server.next_event(), 0
    assert (request.method, request.target) == (b"POST", b"/v1/completions")
    while not isinstance(event := server.next_event(), h11.EndOfMessage):
        num_bytes += len(event.data)
    assert data[refused.num_bytes :] == server.trailing_data[0]
    assert refused.closes == (server.their_state is h11.MUST_CLOSE)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
    client.receive_data(refused.answer)
    assert client.next_event().status_code == 429
    assert json.loads(client.next_event().data)["error"]["code"] == "queue_full"
    assert isinstance(client.next_event(), h11.EndOfMessage)


def test_the_usual_request_is_refused_quickly():
    refused = refuse_quickly(full_state(), REQUEST, [(b"date", b"today")])
    assert refused.num_bytes == len(REQUEST)
    assert b"\r\ndate: today\r\n" in refused.answer
    assert refuse_quickly(full_state(), REQUEST[:-15], []).num_bytes == len(REQUEST)  # the body may come later


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"POST", b"GET"),
        (b"/v1/completions", b"/v1/models"),
        (b"Host: localhost", b"Host: evil.example"),
        (b"Content-Length: 15", b"Content-Length: 99999999999"),
        (b"Content-Length: 15", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 15", b"Content-Length: 15\r\nExpect: 100-continue"),
        (b"Content-Length: 15", b"Content-Length: 15\r\nOrigin: http://page.example"),
        (b"Content-Length: 15", b"Content-Length: 15\r\nX-Request-Id: mine"),
        (b"Content-Length: 15", b"Content-Length: 15" + b"\r\nX: 1" * 100),
        (b"\r\n\r\n", b"\r\n"),
    ],
)
def test_other_requests_are_parsed(old, new):
    assert refuse_quickly(full_state(), REQUEST.replace(old, new), []) is None


def test_a_server_with_room_or_keys_or_that_is_ending_parses_every_request():
    roomy, ending = full_state(), full_state()
    roomy.service.admission.num_requests = 0
    ending.drain()
    for state in (roomy, ending, full_state(api_keys=("secret",)), ServerState(ServerSettings())):
        assert refuse_quickly(state, REQUEST, []) is None


# --- over connections


@pytest.fixture(scope="module")
def full():
    """A server whose places are all taken."""
    with serve(toy_model(context=20_000), Limits(max_new_tokens=20_000), max_concurrent=1, max_queued=0) as running:
        sockets = start_requests(running, 1, max_tokens=15_000)
        wait_for(lambda: running.service.admission.is_full)
        yield running
        sockets[0].close()
        running.wait_until_idle()


def connect(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60)


def read_until(connection, num_answers):
    received = b""
    while received.count(b"queue_full") < num_answers and (data := connection.recv(1 << 16)):
        received += data
    return received


def num_refused(server):
    return server.state.metrics.answers.labels("/v1/completions", "429")._value.get()


def test_the_answer_is_that_of_the_usual_way(full):
    before = num_refused(full)
    quick, usual = (full.post("/v1/completions", LONG, headers=extra) for extra in ({}, {"X-Request-Id": "mine"}))
    assert (quick.status_code, quick.json()) == (usual.status_code, usual.json())
    pairs = [{name: value for name, value in each.headers.items() if name not in VARYING} for each in (quick, usual)]
    assert pairs[0] == pairs[1]
    assert quick.headers.keys() == usual.headers.keys()
    assert num_refused(full) - before == 2


def test_the_body_may_arrive_later_and_the_connection_is_used_again(full):
    with connect(full) as connection:
        for _ in range(2):
            connection.sendall(REQUEST[:-15])
            assert read_until(connection, 1).startswith(b"HTTP/1.1 429 ")
            connection.sendall(BODY[:4])
            connection.sendall(BODY[4:])
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_wants_it_gets_its_connection_closed_after_the_body(full):
    with connect(full) as connection:
        connection.sendall(REQUEST[:-15].replace(b"Content-Length", b"Connection: close\r\nContent-Length"))
        assert b"\r\nconnection: close\r\n" in read_until(connection, 1)
        connection.sendall(BODY)
        assert connection.recv(100) == b""


def test_a_thousand_requests_at_once_are_all_refused(full):
    with connect(full) as connection:
        connection.sendall(REQUEST * 1000)
        assert read_until(connection, 1000).count(b"HTTP/1.1 429 ") == 1000
