"""The ASGI application: the routes behind the guard.

app = create_app(ServerState(ServerSettings()))
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.json_text import encode_json
from clearhead.server.page_routes import page_paths, page_routes
from clearhead.server.routes import api_routes
from clearhead.server.security import Guard
from clearhead.server.state import ServerState


def public_paths() -> tuple[str, ...]:
    """Return the paths that need no key: /health and the files of the page, which say nothing about the model."""
    return ("/health", *page_paths())


def create_app(state: ServerState) -> Starlette:
    """Return the application; `app.state.server` is the given state."""
    routes = [*api_routes(state), *page_routes(lambda: _loaded(state), state.settings.runs)]
    known = {route.path for route in routes if isinstance(route, Route)}
    middleware = [Middleware(Guard, state=state, public_paths=public_paths(), known_paths=known)]
    if state.settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(state.settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        middleware.insert(0, cors)
    handlers = {ApiError: _answer_api_error, ClearheadError: _answer_invalid, HTTPException: _answer_http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)  # type: ignore[arg-type]
    app.state.server = state
    return app


def _loaded(state: ServerState) -> tuple[Model, str]:
    service = state.require_service()
    return service.model, service.name


async def _answer_api_error(request: Request, error: ApiError) -> Response:
    headers = {**error.headers, **({"Connection": "close"} if error.status >= 500 else {})}
    return Response(encode_json(error.body), error.status, headers, "application/json")


async def _answer_invalid(request: Request, error: ClearheadError) -> Response:
    return await _answer_api_error(request, invalid(str(error)))


async def _answer_http_error(request: Request, error: HTTPException) -> Response:
    """Answer for paths and methods that do not exist."""
    path, method = request.url.path, request.method
    if error.status_code == 404:
        message = f"there is nothing at {path[:200]}; /openapi.json lists all paths"
        found = ApiError(404, message, type="not_found_error", code="not_found")
    elif error.status_code == 405:
        allowed = dict(error.headers or {})
        message = f"{path[:200]} does not answer {method[:20]}; use {allowed.get('Allow', 'another method')}"
        found = ApiError(405, message, code="method_not_allowed", headers=allowed)
    else:
        found = ApiError(error.status_code, str(error.detail))
    return await _answer_api_error(request, found)
