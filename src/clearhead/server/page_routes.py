"""The routes of the page: its static files, and JSON answers about the model under /inspect/.

    app = Starlette(routes=page_routes(lambda: (model, "smollm2")))

The questions are answered in one thread of their own, one after another, so that neither the event loop nor the engine
waits for them. A question whose client has gone away before its turn is not computed.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.server.api_errors import ApiError, invalid, unavailable
from clearhead.server.inspection_data import QUESTIONS, Inspector
from clearhead.server.json_text import encode_json, parse_json
from clearhead.server.threads import run_apart

_MAX_BODY = 4 << 20  # bytes
_MAX_WAITING = 32  # questions; a page asks for a few at a time
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks again, and gets 304 while the file is the same
}


def page_routes(loaded: Callable[[], tuple[Model, str]], runs: Path | None = None) -> list[Route]:
    """Return the routes of the page.

    loaded: returns the model and its name, or raises ApiError while there is none. runs: a folder of training runs.
    """
    static = [
        Route(path, _static_endpoint(file), methods=["GET"], include_in_schema=False)
        for path, file in _static_files().items()
    ]
    questions = _Questions(loaded, runs)
    return [
        *static,
        *(Route(f"/inspect/{name}", questions.endpoint(name), methods=["POST"]) for name in sorted(QUESTIONS)),
    ]


# --- static files


def page_paths() -> tuple[str, ...]:
    """Return the paths of the page's own files, which need no key."""
    return tuple(_static_files())


@dataclass(frozen=True)
class _File:
    """A file of the bundle; all of them together are small, so they are kept in memory."""

    content: bytes
    content_type: str
    tag: str


@cache
def _static_files() -> dict[str, _File]:
    """Return the files of the bundle by their path on the server."""
    folder = files("clearhead").joinpath("page")
    found = {"/": _read_file(folder.joinpath("index.html"))}
    for file in folder.joinpath("assets").iterdir():
        if any(file.name.endswith(suffix) for suffix in _TYPES):
            found[f"/assets/{file.name}"] = _read_file(file)
    return found


def _read_file(file: Traversable) -> _File:
    content = file.read_bytes()
    content_type = next(kind for suffix, kind in _TYPES.items() if file.name.endswith(suffix))
    return _File(content, content_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _static_endpoint(file: _File) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.tag}

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.content_type, headers=headers)

    return endpoint


# --- questions


class _Questions:
    """Answers questions in one thread; refuses them while too many wait."""

    def __init__(self, loaded: Callable[[], tuple[Model, str]], runs: Path | None):
        self._loaded, self._runs = loaded, runs
        self._inspector: Inspector | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="clearhead-inspection")
        self._num_waiting = 0

    def endpoint(self, question: str) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of one question."""

        async def endpoint(request: Request) -> Response:
            self._num_waiting += 1
            try:
                if self._num_waiting > _MAX_WAITING:
                    raise unavailable(f"{_MAX_WAITING} questions are waiting already; try again in a moment", 1)
                model, name = self._loaded()
                if self._inspector is None or self._inspector.model is not model:
                    self._inspector = Inspector(model, name, self._runs)
                return await self._answer(request, question, await _read_body(request), self._inspector)
            except ClearheadError as error:
                return _error(invalid(str(error)))
            except ApiError as error:
                return _error(error)
            finally:
                self._num_waiting -= 1

        return endpoint

    async def _answer(self, request: Request, question: str, body: Any, inspector: Inspector) -> Response:
        """Compute the answer in the thread, or nothing if the client disconnects before its turn."""
        work = self._executor.submit(run_apart, _compute, inspector, question, body)
        future = asyncio.wrap_future(work)
        gone = asyncio.ensure_future(_wait_until_gone(request))
        try:
            waited: set[asyncio.Future[Any]] = {future, gone}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                work.cancel()
                return Response(status_code=499)  # nobody reads it
            return Response(future.result(), media_type="application/json", headers={"Cache-Control": "no-store"})
        finally:
            gone.cancel()


def _compute(inspector: Inspector, question: str, body: Any) -> bytes:
    return encode_json(inspector.answer(question, body))


async def _wait_until_gone(request: Request) -> None:
    """Return when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request) -> Any:
    """Return the JSON body of a request, {} if it has none."""
    content = b""
    try:
        async for part in request.stream():
            content += part
            if len(content) > _MAX_BODY:
                raise ApiError(413, f"the request is larger than {_MAX_BODY >> 20} MiB; ask about a shorter text")
    except ClientDisconnect:
        raise ClearheadError("the connection was closed before the request was complete") from None
    return parse_json(content) if content else {}


def _error(error: ApiError) -> Response:
    content = encode_json(error.body)
    return Response(content, status_code=error.status, media_type="application/json", headers=error.headers)
