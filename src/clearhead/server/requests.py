"""Read the bodies of HTTP requests within limits of size and time.

body = await read_body(scope, receive, limits)
"""

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from clearhead.errors import quote
from clearhead.server.api_errors import ApiError
from clearhead.server.settings import Limits
from clearhead.server.streaming import ClientGoneError


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the body of a request. Raise ApiError if it is not JSON, too large or too slow."""
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        text = f"the content type is {quote(kind)}; send the header Content-Type: application/json"
        raise ApiError(415, text, code="unsupported_media_type")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits)
    content = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                content += message.get("body", b"")
                if len(content) > limits.max_body_bytes:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return bytes(content)
    except TimeoutError:
        text = f"the body of the request was not complete after {limits.body_seconds:g} s"
        raise ApiError(408, text, code="timeout") from None


def _too_large(limits: Limits) -> ApiError:
    message = f"the body of the request is larger than {limits.max_body_bytes} bytes; send a smaller one"
    return ApiError(413, message, code="body_too_large")
