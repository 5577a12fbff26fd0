"""The fields of a chat that are about tools: functions that the model may ask the client to call. Without HTTP.

tools = read_tools({"tools": [{"type": "function", "function": {"name": "now"}}]})
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.errors import quote
from clearhead.server.api_errors import invalid
from clearhead.server.schema_parts import BOOLEAN, STRING, Field, Table
from clearhead.server.settings import Limits

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": STRING,
        "description": STRING,
        "parameters": {"type": "object"},
        "strict": BOOLEAN,
    },
    "required": ["name"],
    "additionalProperties": False,
}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Tools:
    """Functions that the model may call.

    definitions: as the client sent them, for the chat template. schemas: those of the parameters, by function name.
    must_call: whether the answer is nothing but calls of `schemas`. at_most_one: whether there is one call at most.
    """

    definitions: list[dict[str, Any]]
    schemas: Mapping[str, Mapping[str, Any]]
    must_call: bool
    at_most_one: bool


def tool_fields(limits: Limits) -> Table:
    """Return the fields of a chat that are about tools."""
    tool = {
        "type": "object",
        "properties": {"type": {"enum": ["function"]}, "function": _FUNCTION},
        "required": ["type", "function"],
        "additionalProperties": False,
    }
    named = {
        "type": "object",
        "properties": {
            "type": {"enum": ["function"]},
            "function": {"type": "object", "properties": {"name": STRING}, "required": ["name"]},
        },
        "required": ["type", "function"],
        "additionalProperties": False,
    }
    return {
        "tools": Field(
            {"type": "array", "items": tool, "maxItems": limits.max_tools},
            "Functions that the model may ask the client to call, if its chat template knows tools.",
        ),
        "tool_choice": Field(
            {"anyOf": [{"enum": ["none", "auto", "required"]}, named]},
            "none: no calls; auto: the model decides; required: at least one call; or the function to call.",
        ),
        "parallel_tool_calls": Field(BOOLEAN, "Whether an answer may have several calls; by default true."),
    }


def call_schema() -> dict[str, Any]:
    """Return the schema of a call in a message of the assistant."""
    function = {
        "type": "object",
        "properties": {"name": STRING, "arguments": STRING},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {
            "id": STRING,
            "type": {"enum": ["function"]},
            "function": function,
            "index": {"type": "integer"},
        },
        "required": ["function"],
        "additionalProperties": False,
    }


def read_tools(found: Mapping[str, Any]) -> Tools | None:
    """Return the tools of a request; None if the model must not call any. Raise ApiError if the fields do not fit."""
    definitions, choice = found.get("tools", []), found.get("tool_choice", "auto")
    if not definitions and choice not in ("none", "auto"):
        raise invalid("tool_choice needs tools; add them or leave tool_choice out", "tool_choice")
    schemas = _schemas(definitions)
    if not definitions or choice == "none":
        return None
    must_call = choice != "auto"
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        if name not in schemas:
            raise invalid(f"tool_choice names {quote(name)}, which is not among tools", "tool_choice")
        schemas = {name: schemas[name]}
    strict = next((each["function"]["name"] for each in definitions if each["function"].get("strict")), None)
    if strict is not None and not must_call:
        message = f"strict of {quote(strict)} is supported only with tool_choice required or the name of a function"
        raise invalid(message, "tools", "unsupported_parameter")
    at_most_one = isinstance(choice, dict) or not found.get("parallel_tool_calls", True)
    return Tools(definitions, schemas, must_call, at_most_one)


def _schemas(definitions: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the parameters of all functions by name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for number, each in enumerate(definitions):
        name, param = each["function"]["name"], f"tools[{number}].function.name"
        if not _NAME.fullmatch(name):
            raise invalid(f"{param} is {quote(name)}; it may have 1 to 64 letters, digits, and the signs _ . -", param)
        if name in schemas:
            raise invalid(f"{param} is {quote(name)} again; each function needs a name of its own", param)
        schemas[name] = each["function"].get("parameters") or _NO_PARAMETERS
    return schemas
