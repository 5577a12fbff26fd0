"""Refuse requests for which there is no room, before they are parsed: under overload, most requests end here.

    if (refused := refuse_quickly(state, data, default_headers)) is not None: transport.write(refused.answer)

On a CPU, the event loop takes its time from the texts that run: 220 us for a request in the usual way through h11, the
guard and the routes, 40 here. A request gets the answer that it would get there. One that could get another answer,
such as one with a wrong key or from a web page of another origin, is left to them.
"""

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from clearhead.server.api_errors import ApiError
from clearhead.server.json_text import encode_json
from clearhead.server.security import check_host
from clearhead.server.settings import ServerSettings
from clearhead.server.state import ServerState

_REQUEST = re.compile(rb"POST (/v1/(?:completions|chat/completions|responses)) HTTP/1\.1\r\n")
_HEADERS = re.compile(  # those that say where the request ends, or what else its answer depends on
    rb"\r\n((?:host|content-length|connection|transfer-encoding|upgrade|expect|origin|x-request-id)[ \t]*):([^\r]*)",
    re.IGNORECASE,
)
_USUAL_HEADERS = {b"host", b"content-length", b"connection"}
_MAX_DIGITS = 18


class Refused(NamedTuple):
    """A request that is refused."""

    answer: bytes
    num_bytes: int  # length of the request with its body, which may not have arrived completely
    closes: bool  # whether the client wants the connection to be closed afterwards


def refuse_quickly(state: ServerState, data: bytes, default_headers: Sequence[tuple[bytes, bytes]]) -> Refused | None:
    """Return the answer to a request for texts if the queue is full; None if it must be parsed.

    data: what has arrived, from the beginning of a request on. default_headers: those of every answer.
    """
    service = state.service
    if service is None or not service.admission.is_full or state.phase != "serving" or state.settings.api_keys:
        return None
    request, size = _REQUEST.match(data), data.find(b"\r\n\r\n")
    if request is None or size < 0 or not service.is_alive:
        return None
    head = _read_head(data[: size + 2], state.settings)
    if head is None:
        return None
    error = service.admission.full_error()
    content = encode_json(error.body)
    headers = [
        *default_headers,
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
        (b"content-length", b"%d" % len(content)),
        (b"content-type", b"application/json"),
        (b"x-request-id", b"req_" + secrets.token_hex(12).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"openai-processing-ms", b"0"),
        *([(b"connection", b"close")] if head.closes else []),
    ]
    state.metrics.answers.labels(request[1].decode(), str(error.status)).inc()
    lines = [b"HTTP/1.1 429 Too Many Requests", *(b"%b: %b" % each for each in headers), b"", content]
    return Refused(b"\r\n".join(lines), size + 4 + head.num_body_bytes, head.closes)


class _Head(NamedTuple):
    num_body_bytes: int
    closes: bool


def _read_head(head: bytes, settings: ServerSettings) -> _Head | None:
    """Return where a request ends; None if it has unusual headers, or a form that only h11 should read."""
    num_lines = head.count(b"\r\n")
    if head.count(b"\n") != num_lines or head.count(b"\r") != num_lines or num_lines > settings.limits.max_headers:
        return None
    if b"\r\n " in head or b"\r\n\t" in head:  # a header in several lines
        return None
    found = [(name.lower(), value.strip(b" \t")) for name, value in _HEADERS.findall(head)]
    headers = {b"connection": b"keep-alive"} | dict(found)
    if len(dict(found)) != len(found) or headers.keys() != _USUAL_HEADERS:
        return None
    length, connection = headers[b"content-length"], headers[b"connection"].lower()
    if not length.isdigit() or len(length) > _MAX_DIGITS or int(length) > settings.limits.max_body_bytes:
        return None
    if connection not in (b"keep-alive", b"close"):
        return None
    try:
        check_host(headers[b"host"].decode("latin-1"), settings)
    except ApiError:
        return None
    return _Head(int(length), connection == b"close")
