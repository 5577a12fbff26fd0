"""Guard: check the host and the key of every request, give it an id, and catch errors that nothing else has caught.

    app = Guard(app, ServerState(settings), public_paths=("/health",))

Such an error is logged, and the client learns only that there was one.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.errors import quote
from clearhead.server.api_errors import ApiError, failed
from clearhead.server.json_text import encode_json
from clearhead.server.settings import ServerSettings, is_loopback
from clearhead.server.state import ServerState

KEY_SCOPE = "clearhead.key"  # in the ASGI scope: what stands for the key of the client, b"" without keys
_LOGGER = logging.getLogger("clearhead.server")
_MAX_ID_CHARACTERS = 128
_NOT_SENT = 499  # the status that counts if the client goes away before the answer
_ALWAYS_ANSWERED = ("/health", "/metrics", "/version")  # also while the server is ending


class Guard:
    """An ASGI middleware that refuses requests which must not reach the routes."""

    def __init__(
        self, app: ASGIApp, state: ServerState, public_paths: Collection[str] = (), known_paths: Collection[str] = ()
    ):
        """Guard an application.

        public_paths: paths that need no key. known_paths: paths that are counted by name.
        """
        self._app, self._state, self._public_paths, self._known_paths = app, state, public_paths, known_paths
        self._digests = [_digest(key) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, headers = time.monotonic(), Headers(scope=scope)
        answer = _Answer(send, _request_id(headers), started)
        self._state.num_active += 1
        try:
            self._check(scope, headers)
            await self._app(scope, receive, answer.send)
        except ApiError as error:
            await answer.send_error(error)
        except Exception:
            _LOGGER.exception("request %s failed", answer.request_id)
            await answer.send_error(failed())
        finally:
            self._state.num_active -= 1
            path = scope["path"] if scope["path"] in self._known_paths else "other"
            self._state.metrics.answers.labels(path, str(answer.status)).inc()

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise ApiError unless the request may go on."""
        if len(headers.raw) > self._state.settings.limits.max_headers:
            raise ApiError(431, f"the request has {len(headers.raw)} headers; send fewer")
        check_host(headers.get("host"), self._state.settings)
        path = scope["path"]
        if path not in _ALWAYS_ANSWERED:
            self._state.check_serving()
        scope[KEY_SCOPE] = b""
        if self._digests and scope["method"] != "OPTIONS" and path not in self._public_paths:
            scope[KEY_SCOPE] = self._check_key(headers)

    def _check_key(self, headers: Headers) -> bytes:
        """Return the digest of the client's key. All keys are compared, each in constant time."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        matches = [secrets.compare_digest(digest, each) for each in self._digests]
        if not any(matches):
            what = "a wrong API key was given" if given else "an API key is missing"
            message = f"{what}; send the header Authorization: Bearer KEY"
            headers_out = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers_out)
        return digest


def check_host(host: str | None, settings: ServerSettings) -> None:
    """Raise ApiError unless the Host header names this machine or an allowed host.

    A web page that makes its own name point to 127.0.0.1 (DNS rebinding) would otherwise reach a server on loopback.
    """
    if not settings.listens_on_loopback and not settings.allowed_hosts:
        return
    name = (host or "").rsplit(":", 1)[0] if not (host or "").endswith("]") else host or ""
    if is_loopback(name) or name.lower() in {each.lower() for each in settings.allowed_hosts}:
        return
    message = f"the host {quote(host)} is not served here; use 127.0.0.1 or localhost, or start with --allow-host"
    raise ApiError(403, message, type="permission_error", code="host_not_allowed")


class _Answer:
    """Adds the id of the request to its answer, and remembers its status."""

    def __init__(self, send: Send, request_id: str, started: float):
        self._send, self.request_id, self._started = send, request_id, started
        self.status = _NOT_SENT

    async def send(self, message: Message) -> None:
        """Send a message of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            headers["x-content-type-options"] = "nosniff"
            headers["openai-processing-ms"] = str(round((time.monotonic() - self._started) * 1000))
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """Send an error, unless the answer has begun."""
        if self.status != _NOT_SENT:
            return
        headers = {"content-type": "application/json", **error.headers}
        if error.status >= 500:
            headers["connection"] = "close"
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
        await self.send({"type": "http.response.body", "body": encode_json(error.body)})


def _request_id(headers: Headers) -> str:
    """Return the id that the client gave, if it is printable, or a new one."""
    given = headers.get("x-request-id", "")
    is_usable = 0 < len(given) <= _MAX_ID_CHARACTERS and given.isascii() and given.isprintable()
    return given if is_usable else f"req_{secrets.token_hex(12)}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
