"""HTTP processes: clients get the same as from a server in one process. The rules are those of the imported tests."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from clearhead.errors import ClearheadError
from clearhead.server import Limits, ServerSettings
from tests.server.test_chat import test_a_stream_begins_with_the_role_and_ends_with_an_empty_delta  # noqa: F401
from tests.server.test_completions import (  # noqa: F401
    test_a_stream_has_the_text_of_a_complete_answer,
    test_cached_tokens_of_a_prefix_are_reported,
    test_n_texts_of_several_prompts_are_in_order,
    test_the_text_is_that_of_the_python_api,
    test_the_usage_of_a_stream_comes_last,
)
from tests.server.test_load import HEAD, start_requests, wait_for
from tests.server.test_other_endpoints import test_embeddings_equal_those_of_the_python_api_alone  # noqa: F401
from tests.server.test_refusals import test_a_large_body_is_refused, test_other_paths_and_methods  # noqa: F401
from tests.server.test_responses import test_a_stream_has_numbered_events_and_the_same_text  # noqa: F401
from tests.server.test_security import (  # noqa: F401
    test_ids_of_requests_are_echoed_or_made,
    test_too_many_headers_are_refused,
)
from tests.server.test_storms import test_headers_without_an_end_are_refused  # noqa: F401
from tests.server.toys import LETTERS, serve, toy_model


@pytest.fixture(scope="module")
def server():
    with serve(toy_model(), http_processes=2) as running:
        yield running
        running.wait_until_idle()


def read_answers(connection, count):
    """Return the heads and bodies of answers with lengths, from one connection."""
    received, found = b"", []
    while len(found) < count:
        head, separator, rest = received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]) if separator else 0
        if separator and len(rest) >= length:
            found.append((head, rest[:length]))
            received = rest[length:]
        else:
            data = connection.recv(1 << 16)
            assert data, received
            received += data
    return found


def test_requests_that_share_a_connection_are_answered_in_order(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(60)
        bodies = [json.dumps({"prompt": text, "max_tokens": 2, "echo": True}).encode() for text in ("one", "two")]
        requests = [HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]
        connection.sendall(b"".join(requests) + b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        first, second = read_answers(connection, 2)
        assert json.loads(first[1])["choices"][0]["text"].startswith("one")
        assert json.loads(second[1])["choices"][0]["text"].startswith("two")


def test_a_body_that_comes_in_parts_is_read_to_its_end(server):
    body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(60)
        connection.sendall(HEAD + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 ")
        for start in range(0, len(body), 7):
            part = body[start : start + 7]
            connection.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        connection.sendall(b"0\r\n\r\n")
        ((head, content),) = read_answers(connection, 1)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert json.loads(content)["usage"]["prompt_tokens"] == 5


def test_many_streams_at_once_get_what_each_gets_alone(server):
    bodies = [{"prompt": f"{number} ", "max_tokens": 20, "logit_bias": LETTERS, "seed": number} for number in range(40)]
    alone = [server.text(**body) for body in bodies]
    with ThreadPoolExecutor(40) as threads:
        streams = list(threads.map(lambda body: server.events("/v1/completions", body), bodies))
    assert ["".join(event["choices"][0]["text"] for event in events) for events in streams] == alone


def test_an_error_in_the_application_ends_only_its_connection(server, monkeypatch, caplog):
    def fail(**options):
        raise RuntimeError("broken")

    with monkeypatch.context() as patched:
        patched.setattr("clearhead.server.security.MutableHeaders", fail)
        with pytest.raises(Exception, match="disconnected"):
            server.get("/health")
    assert "broken" in caplog.text
    assert server.get("/health").status_code == 200


def test_clients_that_go_away_together_free_their_places_and_leave_no_tasks():
    limits = Limits(max_body_bytes=100_000)
    with serve(toy_model(context=4096), limits=limits, http_processes=2, max_concurrent=4, max_queued=60) as server:
        for stream in (False, True):
            sockets = start_requests(server, 40, max_tokens=4000, stream=stream)
            wait_for(lambda: server.service.admission.num_texts == 40)
            for each in sockets:
                each.close()
            server.wait_until_idle()
        wait_for(lambda: server.state.num_active == 0)
        assert server.text(max_tokens=2)


@pytest.mark.parametrize("count", [-1, 65])
def test_an_impossible_number_is_refused(count):
    with pytest.raises(ClearheadError, match="it must be from 1 to 64, or 0 for none"):
        ServerSettings(http_processes=count)
