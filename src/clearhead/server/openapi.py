"""The OpenAPI document of the server, made from the tables that requests are checked with.

document = openapi_document(Limits())
"""

from importlib.metadata import version
from typing import Any

from clearhead.server.response_schemas import response_fields
from clearhead.server.schema_parts import STRING, Table
from clearhead.server.schemas import (
    chat_fields,
    completion_fields,
    detokenize_fields,
    embedding_fields,
    tokenize_fields,
)
from clearhead.server.settings import Limits

_STREAM = {"text/event-stream": {"schema": STRING}}


def openapi_document(limits: Limits) -> dict[str, Any]:
    """Return the document."""
    posts = {
        "/v1/completions": ("Continue prompts", completion_fields(limits), True),
        "/v1/chat/completions": ("Answer a conversation", chat_fields(limits), True),
        "/v1/responses": ("Answer a conversation, in the newer form", response_fields(limits), True),
        "/v1/embeddings": ("Return vectors of texts", embedding_fields(limits), False),
        "/tokenize": ("Return the token ids of a text or a conversation", tokenize_fields(limits), False),
        "/detokenize": ("Return the text of token ids", detokenize_fields(limits), False),
    }
    gets = {
        "/health": "Say whether requests are answered",
        "/version": "Name the version",
        "/v1/models": "List the names of the model",
        "/tokenizer_info": "Describe the tokenizer",
    }
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in gets.items()}
    paths["/metrics"] = {"get": _operation("Report measurements to Prometheus", {"text/plain": {"schema": STRING}})}
    name = {"name": "name", "in": "path", "required": True, "schema": STRING}
    paths["/v1/models/{name}"] = {"get": {**_operation("Describe a model"), "parameters": [name]}}
    for path, (summary, table, streams) in posts.items():
        content = {"application/json": {"schema": _request_schema(table)}}
        operation = _operation(summary, {**_json(), **(_STREAM if streams else {})})
        paths[path] = {"post": {**operation, "requestBody": {"required": True, "content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Clearhead", "version": version("clearhead"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {"Error": _error_schema()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _request_schema(table: Table) -> dict[str, Any]:
    """Return the schema of a request body. Every field may be null, which means its default."""
    properties = {
        name: {**_or_null(each.schema, each.required), "description": each.description}
        for name, each in table.items()
        if each.schema.get("enum") != []  # no value is accepted
    }
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name, each in table.items() if each.required],
        "additionalProperties": True,
    }


def _or_null(schema: Any, required: bool) -> dict[str, Any]:
    return dict(schema) if required else {"anyOf": [dict(schema), {"type": "null"}]}


def _operation(summary: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    reference = {"schema": {"$ref": "#/components/schemas/Error"}}
    error = {"description": "An error", "content": {"application/json": reference}}
    answer = {"description": summary, "content": content or _json()}
    return {"summary": summary, "responses": {"200": answer, "default": error}}


def _json() -> dict[str, Any]:
    return {"application/json": {"schema": {"type": "object"}}}


def _error_schema() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    error = {
        "type": "object",
        "properties": {"message": STRING, "type": STRING, "param": text, "code": text},
        "required": ["message", "type", "param", "code"],
    }
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
