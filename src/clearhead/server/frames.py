"""Frames: what the HTTP processes of a server and its main process send each other over a socket.

    channel = FrameChannel(on_frame, on_end); channel.send(Kind.PART, 7, b"data: ...")

A frame has the length of its content (4 bytes), its kind (1 byte), the number that an HTTP process gave the request it
belongs to (8 bytes), and the content. All frames that are sent in one turn of the event loop leave in one packet, so
that a step of the engine costs one packet for each process and not one for each stream.
"""

import asyncio
import json
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

from starlette.types import Scope

_PREFIX = Struct("<IBQ")
_TEXTS = ("http_version", "method", "scheme", "path", "root_path")  # of an ASGI scope
_BYTES = ("raw_path", "query_string")


class Kind(IntEnum):
    """What a frame says about its request."""

    # from an HTTP process
    REQUEST = 1  # a request has arrived: its ASGI scope
    BODY = 2  # a part of its body
    LAST_BODY = 3  # the last part
    OVER = 4  # the answer is complete, or the client is gone
    # from the main process
    HEAD = 5  # status and headers of the answer
    PART = 6  # a part of its body, of which the client is told no length
    END = 7  # the last part, or the only one
    CUT = 8  # close the connection


class Frame(NamedTuple):
    """A message of one request. kind: a Kind as a plain number."""

    kind: int
    number: int
    content: bytes


def encode_frame(kind: int, number: int, content: bytes) -> bytes:
    """Return the bytes of a frame."""
    return _PREFIX.pack(len(content), kind, number) + content


class FrameDecoder:
    """Joins bytes that arrive in pieces of any size to frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that this piece completes."""
        buffer, start, frames = self._rest, 0, list[Frame]()
        buffer += data
        while len(buffer) >= start + _PREFIX.size:
            length, kind, number = _PREFIX.unpack_from(buffer, start)
            begin, end = start + _PREFIX.size, start + _PREFIX.size + length
            if len(buffer) < end:
                break
            frames.append(Frame(kind, number, bytes(buffer[begin:end])))
            start = end
        del buffer[:start]
        return frames


class FrameChannel(asyncio.Protocol):
    """One end of the socket between the main process and an HTTP process. For the event loop only."""

    def __init__(self, on_frame: Callable[[Frame], None], on_end: Callable[[], None]):
        """on_frame: gets every frame that arrives. on_end: is called once the other process is gone, or after close."""
        self._on_frame, self._on_end = on_frame, on_end
        self._decoder = FrameDecoder()
        self._waiting: list[bytes] = []  # frames of this turn of the event loop
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass complete frames on."""
        for frame in self._decoder.feed(data):
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that no more frames will come."""
        self._transport = None
        self._on_end()

    def send(self, kind: Kind, number: int, content: bytes = b"") -> None:
        """Send a frame at the end of this turn of the event loop; never wait."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(encode_frame(kind, number, content))

    def _flush(self) -> None:
        content = b"".join(self._waiting)
        self._waiting.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(content)

    def close(self) -> None:
        """Send what has not been sent, and close this end."""
        self._flush()
        if self._transport is not None:
            self._transport.close()


# --- contents


def encode_scope(scope: Scope) -> bytes:
    """Return what of an ASGI scope describes the request, as JSON."""
    data: dict[str, Any] = {name: scope[name] for name in (*_TEXTS, "client", "server")}
    data |= {name: scope[name].decode("latin-1") for name in _BYTES}
    return json.dumps({**data, "headers": _as_texts(scope["headers"])}).encode()


def decode_scope(content: bytes) -> Scope:
    """Return an ASGI scope without state."""
    data = json.loads(content)
    scope = {name: data[name] for name in _TEXTS} | {name: data[name].encode("latin-1") for name in _BYTES}
    scope |= {name: None if data[name] is None else tuple(data[name]) for name in ("client", "server")}
    asgi = {"version": "3.0", "spec_version": "2.3"}
    return {"type": "http", "asgi": asgi, "headers": _as_bytes(data["headers"]), "state": {}, **scope}


def encode_head(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return status and headers of an answer as JSON."""
    return json.dumps([status, _as_texts(headers)]).encode()


def decode_head(content: bytes) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Return status and headers of an answer."""
    status, headers = json.loads(content)
    return status, _as_bytes(headers)


def _as_texts(headers: list[tuple[bytes, bytes]]) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def _as_bytes(headers: list[list[str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
