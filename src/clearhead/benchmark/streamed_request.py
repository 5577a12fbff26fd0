"""One HTTP request to a server of this machine, and the server-sent events of its answer, without blocking.

    request = StreamedRequest(port, "/completion", {"prompt": [1, 2]}); selector.register(request.socket, EVENT_READ)
    for event in request.read(): ...    # when the socket is readable

Thousands of tokens arrive per second, while the server needs the processor: a thread for each request would cost more
than the parsing here.
"""

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

from clearhead.errors import ClearheadError

_HOST = "127.0.0.1"
_READ_BYTES = 1 << 16


class StreamedRequest:
    """A POST request with a JSON body, sent when it is created, and its answer in chunks (RFC 9112, section 7.1)."""

    def __init__(self, port: int, path: str, body: dict[str, Any]):
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {_HOST}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        self.socket = socket.create_connection((_HOST, port))
        self.socket.sendall(head.encode() + content)
        self.socket.setblocking(False)
        self.is_closed = False  # whether the server has sent everything
        self._received = b""  # not parsed yet
        self._body = b""  # of the answer, not parsed yet
        self._has_head = False

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have arrived completely. Raise ClearheadError if the server reports an error."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        self.is_closed = not data
        self._received += data
        if not self._has_head:
            self._parse_head()
        while self._has_head and self._parse_chunk():
            pass
        *lines, self._body = self._body.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        """Close the connection; a server then ends the request."""
        self.socket.close()

    def _parse_head(self) -> None:
        head, end, rest = self._received.partition(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        length = re.search(rb"(?i)\r\nContent-Length: *(\d+)", head)
        is_complete = self.is_closed or (end and length is not None and len(rest) >= int(length[1]))
        if is_complete and status != [b"200"]:
            raise ClearheadError(f"the server refused a request: {(rest or head).decode(errors='replace')[:200]!r}")
        if end and status == [b"200"]:
            self._has_head, self._received = True, rest

    def _parse_chunk(self) -> bool:
        """Move one complete chunk to the body; return False if there is none."""
        size, end, rest = self._received.partition(b"\r\n")
        if not end:
            return False
        length = int(size.split(b";")[0], 16)
        if len(rest) < length + len(b"\r\n"):
            return False
        self._body, self._received = self._body + rest[:length], rest[length + len(b"\r\n") :]
        return True
