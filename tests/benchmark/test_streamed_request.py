"""Test the parsing of streamed answers: however a network divides one, and against the standard library's client."""

import http.client
import io
import json
import select
import socket
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.benchmark.streamed_request import _LAST_CHUNK, StreamedRequest, is_closed_by_peer, parse_answer
from clearhead.errors import ClearheadError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
events = st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6), max_size=3), max_size=5)


def cut(content, cuts):
    """Divide bytes at these places; the n-th part arrives at n seconds."""
    places = sorted({place % (len(content) + 1) for place in cuts} | {0, len(content)})
    return [(float(n), content[a:b]) for n, (a, b) in enumerate(pairwise(places))]


def answer_of(given_events, sizes):
    """Return an answer with these events, in chunks of these sizes."""
    body = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in given_events) + b"data: [DONE]\n\n"
    chunks = [data for _, data in cut(body, sizes)]
    return HEAD + b"".join(b"%X\r\n%b\r\n" % (len(each), each) for each in chunks if each) + b"0\r\n\r\n"


class Connection:
    """A socket that http.client can read an answer from."""

    def __init__(self, content):
        self.content = content

    def makefile(self, mode):
        return io.BytesIO(self.content)


@given(events, st.lists(st.integers(0, 500), max_size=6), st.lists(st.integers(0, 900), max_size=9))
def test_the_events_are_those_that_the_standard_library_reads_however_they_are_divided(given_events, sizes, cuts):
    content = answer_of(given_events, sizes)
    parts = cut(content, cuts)
    found = list(parse_answer(parts))
    response = http.client.HTTPResponse(Connection(content))
    response.begin()
    lines = response.read().decode().split("\n")
    assert [event for _, event in found] == [json.loads(each[6:]) for each in lines if each.startswith("data: {")]
    assert [event for _, event in found] == given_events
    received = b""
    for arrived, data in parts:  # an event has the time of the part that completed it, and not an earlier one
        received += data
        assert len(list(parse_answer([(0.0, received)]))) == sum(at <= arrived for at, _ in found)
    assert content.endswith(_LAST_CHUNK)


def test_a_refusal_is_an_error_with_its_reason():
    content = b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 13\r\n\r\n{"error": "x"}'
    with pytest.raises(ClearheadError, match=r"""the server refused a request: '{"error": "x"}'"""):
        list(parse_answer(cut(content, [5, 40])))


def test_a_connection_is_used_again_after_a_stream_and_after_a_refusal():
    refusal = b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 14\r\n\r\n{"error": "x"}'
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = server = None
        received = []
        for content in (answer_of([{"n": 1}], [9]), refusal, answer_of([{"n": 2}], [])):
            request = StreamedRequest(listener.getsockname()[1], "/x", {}, connection)
            server = server or listener.accept()[0]
            received.append(server.recv(1000))
            for part in (content[:5], content[5:-3]):
                server.sendall(part)
                wait_and_receive(request)
                assert not request.is_complete
            server.sendall(content[-3:])
            wait_and_receive(request)
            assert request.is_complete
            assert request.is_kept
            assert not is_closed_by_peer(request.socket)
            assert b"".join(data for _, data in request.parts) == content
            connection = request.socket
        server.close()
        select.select([request.socket], [], [], 10)
        assert is_closed_by_peer(request.socket)
        wait_and_receive(request)
        assert request.is_closed
        assert not request.is_kept
        assert not request.is_lost
        request = StreamedRequest(listener.getsockname()[1], "/x", {}, connection)
        wait_and_receive(request)
        assert request.is_lost
        request.close()
    assert all(each.startswith(b"POST /x HTTP/1.1\r\n") for each in received)


def test_a_connection_that_the_server_will_close_is_not_kept():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        request = StreamedRequest(listener.getsockname()[1], "/x", {})
        server = listener.accept()[0]
        server.sendall(answer_of([{"n": 1}], []).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1))
        wait_and_receive(request)
        assert request.is_complete
        assert not request.is_kept
        request.close()
        server.close()


def wait_and_receive(request):
    select.select([request.socket], [], [], 10)
    request.receive()
