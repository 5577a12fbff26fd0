"""The fields of /v1/responses, as JSON Schema with a description. Without HTTP.

table = response_fields(Limits()); table["input"].schema
"""

from typing import Any

from clearhead.server.schema_parts import BOOLEAN, STRING, Field, Table, refused, whole
from clearhead.server.schemas import identity_fields, sampling_fields
from clearhead.server.settings import Limits


def response_fields(limits: Limits) -> Table:
    """Return the fields of /v1/responses."""
    no_tools = "tool calls are part of /v1/chat/completions"
    no_memory = "the server keeps nothing of earlier requests"
    return {
        "model": Field(STRING, "The model; one of /v1/models. It may be left out."),
        "input": Field(_input_schema(limits), "A text, or a list of messages.", required=True),
        "instructions": Field(STRING, "The system message."),
        "max_output_tokens": Field(whole(1, limits.max_new_tokens), "Maximum number of new tokens."),
        **sampling_fields(limits),
        "stream": Field(BOOLEAN, "Send events while the text is generated."),
        "stream_options": Field(
            {"type": "object", "properties": {"include_obfuscation": BOOLEAN}, "additionalProperties": False},
            "Events are never padded.",
        ),
        "text": Field(_text_schema(), "The format of the text: text, json_object or json_schema."),
        **identity_fields(),
        "background": refused("requests are answered at once", False),
        "conversation": refused(no_memory),
        "include": refused("answers have no optional parts", []),
        "max_tool_calls": refused(no_tools),
        "parallel_tool_calls": refused(no_tools, True, False),
        "previous_response_id": refused(no_memory),
        "prompt": refused("there are no stored prompts"),
        "reasoning": refused("models here have no such setting", {}),
        "tool_choice": refused(no_tools, "none", "auto"),
        "tools": refused(no_tools, []),
        "top_logprobs": refused("log-probabilities are part of /v1/chat/completions", 0),
        "truncation": refused("prompts are never truncated", "disabled"),
    }


def _input_schema(limits: Limits) -> dict[str, Any]:
    part = {
        "type": "object",
        "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": STRING},
        "required": ["type", "text"],
    }
    message = {
        "type": "object",
        "properties": {
            "type": {"enum": ["message"]},
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"anyOf": [STRING, {"type": "array", "items": part}]},
            "id": STRING,
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    return {"anyOf": [STRING, {"type": "array", "items": message, "minItems": 1, "maxItems": limits.max_messages}]}


def _text_schema() -> dict[str, Any]:
    text_format = {
        "type": "object",
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "name": STRING,
            "description": STRING,
            "schema": {"type": "object"},
            "strict": BOOLEAN,
        },
        "required": ["type"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"format": text_format, "verbosity": {"enum": ["medium"]}},
        "additionalProperties": False,
    }
