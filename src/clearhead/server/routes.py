"""The routes of the API: they read requests, wait for results and send answers. Model code is elsewhere.

routes = api_routes(ServerState(settings))
"""

import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from clearhead.server.answers import AnswerFormat, AnswerHead, collect
from clearhead.server.chat import ChatFormat, plan_chat
from clearhead.server.completions import CompletionFormat, plan_completion
from clearhead.server.embeddings import embed, embedding_answer, plan_embeddings
from clearhead.server.job import Job, Plan
from clearhead.server.json_text import encode_json
from clearhead.server.metrics import CONTENT_TYPE
from clearhead.server.openapi import openapi_document
from clearhead.server.protocol import CONNECTION, Connection
from clearhead.server.requests import read_body
from clearhead.server.responses import ResponseFormat, plan_response
from clearhead.server.security import KEY_SCOPE
from clearhead.server.service import Service
from clearhead.server.state import ServerState
from clearhead.server.streaming import ClientGoneError, run_while_connected, send_stream
from clearhead.server.tokenize import detokenize, tokenize, tokenizer_info


class _Planner(Protocol):
    """A function that reads a body, in a thread, and returns what it asks for and the texts."""

    def __call__(self, service: Service, body: bytes, salt: bytes) -> tuple[Any, Plan]: ...


def api_routes(state: ServerState) -> list[BaseRoute]:
    """Return all routes of the API."""
    endpoints = _Endpoints(state)
    return [
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/metrics", endpoints.metrics, methods=["GET"]),
        Route("/openapi.json", endpoints.openapi, methods=["GET"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/tokenizer_info", endpoints.tokenizer_info, methods=["GET"]),
        Route("/tokenize", _Post(state, _prepared(tokenize)), methods=["POST"]),
        Route("/detokenize", _Post(state, _prepared(detokenize)), methods=["POST"]),
        Route("/v1/embeddings", _Post(state, _embeddings), methods=["POST"]),
        Route("/v1/completions", _Generation(state, plan_completion, CompletionFormat, "cmpl"), methods=["POST"]),
        Route("/v1/chat/completions", _Generation(state, plan_chat, ChatFormat, "chatcmpl"), methods=["POST"]),
        Route("/v1/responses", _Generation(state, plan_response, ResponseFormat, "resp"), methods=["POST"]),
    ]


def _json_response(data: Any) -> Response:
    """Return an answer in JSON."""
    return Response(encode_json(data), media_type="application/json")


class _Endpoints:
    """Answers to GET requests."""

    def __init__(self, state: ServerState):
        self._state = state

    async def health(self, request: Request) -> Response:
        """Say whether requests are answered."""
        self._state.require_service()
        self._state.check_serving()
        return _json_response({"status": "ok"})

    async def version(self, request: Request) -> Response:
        """Name the version."""
        return _json_response({"version": version("clearhead")})

    async def openapi(self, request: Request) -> Response:
        """Describe all routes."""
        return _json_response(openapi_document(self._state.settings.limits))

    async def metrics(self, request: Request) -> Response:
        """Report all measurements to Prometheus."""
        return Response(self._state.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """List the names of the model."""
        service = self._state.require_service()
        return _json_response({"object": "list", "data": [_model_data(service, name) for name in service.names]})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        service, name = self._state.require_service(), request.path_params["name"]
        service.check_model(name)
        return _json_response(_model_data(service, name))

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe the tokenizer."""
        return _json_response(tokenizer_info(self._state.require_service()))


def _model_data(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "clearhead",
        "root": service.name,
        "max_model_len": service.max_length,
    }


class _Post:
    """An ASGI app that answers a JSON body with JSON."""

    def __init__(self, state: ServerState, answer: Callable[[Service, bytes], Awaitable[bytes]]):
        self._state, self._answer = state, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._state.require_service()
        try:
            with service.admission.request():
                body = await read_body(scope, receive, service.settings.limits)
                content = await run_while_connected(_awaited(self._answer(service, body)), receive)
                response = Response(content, media_type="application/json")
        except ClientGoneError:
            return
        await response(scope, receive, send)


async def _awaited(result: Awaitable[bytes]) -> bytes:
    return await result


def _prepared(function: Callable[[Service, bytes], Any]) -> Callable[[Service, bytes], Awaitable[bytes]]:
    """Return an endpoint whose function runs in a thread, and whose answer, which may be large, is encoded there."""

    async def answer(service: Service, body: bytes) -> bytes:
        return await service.prepare(lambda: encode_json(function(service, body)))

    return answer


async def _embeddings(service: Service, body: bytes) -> bytes:
    asked = await service.prepare(plan_embeddings, service, body)
    vectors = [await service.compute(embed, service, text, asked.dimensions) for text in asked.texts]
    return await service.prepare(lambda: encode_json(embedding_answer(service, asked, vectors)))


class _Generation:
    """An ASGI app that answers with generated texts, at once or as a stream."""

    def __init__(
        self, state: ServerState, plan: _Planner, form: Callable[[AnswerHead, Any], AnswerFormat], prefix: str
    ):
        self._state, self._plan, self._form, self._prefix = state, plan, form, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived, service = time.monotonic(), self._state.require_service()
        limits, connection = service.settings.limits, scope["state"][CONNECTION]
        try:
            with service.admission.request() as admitted:
                body = await read_body(scope, receive, limits)
                work = service.prepare(self._plan, service, body, scope[KEY_SCOPE])
                asked, plan = await run_while_connected(work, receive)
                admitted.enter(len(plan.requests), plan.num_tokens_to_read)
                job = Job(service, plan, arrived)
                form = self._form(AnswerHead.create(self._prefix, service.name, service.fingerprint), asked)
                if asked.stream:
                    await _stream(job, form, receive, send, connection)
                    return
                response = await _complete(job, form, receive)
        except ClientGoneError:
            connection.cut_off()
            return
        await response(scope, receive, send)


async def _stream(job: Job, form: AnswerFormat, receive: Receive, send: Send, connection: Connection) -> None:
    try:
        await send_stream(job, form, receive, send, connection)
    finally:
        job.close()


async def _complete(job: Job, form: AnswerFormat, receive: Receive) -> Response:
    try:
        texts = await run_while_connected(collect(job), receive)
        return _json_response(form.complete(texts, job.usage))
    finally:
        job.close()
