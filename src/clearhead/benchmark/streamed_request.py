"""One HTTP request to a server of this machine, and the server-sent events of its answer, without blocking.

    request = StreamedRequest(port, "/completion", {"prompt": [1, 2]}); selector.register(request.socket, EVENT_READ)
    request.receive()                                     # whenever the socket is readable, until request.is_complete
    for arrived, event in parse_answer(request.parts): ...

Thousands of tokens arrive per second, while the server needs the processor. While it does, the parts of an answer are
therefore only kept, with the time of each; they are parsed when all answers have arrived.
"""

import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from clearhead.errors import ClearheadError

_HOST = "127.0.0.1"
_READ_BYTES = 1 << 14
_STREAMED = b"HTTP/1.1 200 "
_LAST_CHUNK = b"\r\n0\r\n\r\n"  # with the end of the chunk before it (RFC 9112, section 7.1)

Parts = Sequence[tuple[float, bytes]]  # what was received, with the times (time.perf_counter)


class StreamedRequest:
    """A POST request with a JSON body, sent when it is created, and its answer, usually in chunks."""

    def __init__(self, port: int, path: str, body: dict[str, Any], connection: socket.socket | None = None):
        """connection: one on which an earlier answer is complete; None opens one."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self.socket = connection or socket.create_connection((_HOST, port))
        self.socket.setblocking(True)
        self.socket.sendall(head.encode() + content)
        self.socket.setblocking(False)
        self.parts: list[tuple[float, bytes]] = []
        self.is_reused = connection is not None
        self.is_closed = False  # whether the server has closed the connection
        self._end = b""  # the last bytes that have arrived

    def receive(self) -> None:
        """Keep what has arrived."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:  # the server has ended
            data = b""
        self.parts.append((time.perf_counter(), data))
        self._end = (self._end + data)[-len(_LAST_CHUNK) :]
        self.is_closed = not data

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer has arrived, or the server has closed the connection."""
        return self.is_closed or self._end == _LAST_CHUNK or self._has_whole_refusal()

    @property
    def is_lost(self) -> bool:
        """Whether the server closed a reused connection without an answer. The request must then be sent again."""
        return self.is_reused and self.is_closed and not any(data for _, data in self.parts)

    @property
    def is_kept(self) -> bool:
        """Whether the connection can be used for another request. Ask only when the answer is complete."""
        if self.is_closed:
            return False
        head = b"".join(data for _, data in self.parts).partition(b"\r\n\r\n")[0]
        return re.search(rb"(?i)\r\nConnection: *close", head) is None

    def close(self) -> None:
        """Close the connection; a server then ends the request."""
        self.socket.close()

    def _has_whole_refusal(self) -> bool:
        """Return whether the answer is no stream, and complete."""
        if not self.parts or self.parts[0][1].startswith(_STREAMED):
            return False
        head, _, content = b"".join(data for _, data in self.parts).partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\nContent-Length: *(\d+)", head)
        return length is not None and len(content) >= int(length[1])


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Return whether the server has closed an idle connection, whose socket must be in non-blocking mode."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:  # there is nothing to read
        return False
    except ConnectionError:
        return True


def parse_answer(parts: Parts) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield all events of an answer, with the time at which each was complete.

    Raise ClearheadError if the server has refused the request.
    """
    received, body, has_head = b"", b"", False
    for arrived, data in parts:
        received += data
        if not has_head and b"\r\n\r\n" in received:
            _check_status(b"".join(data for _, data in parts))
            has_head, received = True, received.partition(b"\r\n\r\n")[2]
        while has_head and (chunk := _first_chunk(received)) is not None:
            content, received = chunk
            body += content
        *lines, body = body.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield arrived, json.loads(line.removeprefix(b"data: "))


def _check_status(answer: bytes) -> None:
    head, _, content = answer.partition(b"\r\n\r\n")
    if not head.startswith(_STREAMED):
        raise ClearheadError(f"the server refused a request: {(content or head).decode(errors='replace')[:200]!r}")


def _first_chunk(received: bytes) -> tuple[bytes, bytes] | None:
    """Return the content of the first chunk and what follows it; None if it is not complete."""
    size, end, rest = received.partition(b"\r\n")
    if not end:
        return None
    length = int(size.split(b";")[0], 16)
    if len(rest) < length + len(b"\r\n"):
        return None
    return rest[:length], rest[length + len(b"\r\n") :]
