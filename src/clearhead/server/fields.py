"""From JSON to typed requests. Every known field is used, or refused by name. Without HTTP.

asked = read_completion(body, Limits(), vocab_size=32_000); asked.prompts, asked.options
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from clearhead.errors import quote, unknown_name
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.json_checks import check_value, describe
from clearhead.server.messages import plain_messages
from clearhead.server.schema_parts import Table
from clearhead.server.schemas import chat_fields, completion_fields
from clearhead.server.settings import Limits
from clearhead.server.tool_fields import Tools, read_tools
from clearhead.server.tool_syntax import ToolSyntax

_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API
_LOGGER = logging.getLogger("clearhead.server")
_MAX_NAME = 80  # characters of an unknown field that messages repeat
_MISSPELLED = 0.85  # an unknown name this similar (0 to 1) to a known one counts as misspelled
_MAX_REPORTED = 100
_REPORTED: set[str] = set()  # unknown fields that the log has named
_OPTIONS = {  # name of a field -> name in SamplingOptions
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "min_tokens": "min_new_tokens",
    "stop": "stop",
}
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")  # variables that the renderer sets itself


@dataclass(frozen=True, kw_only=True)
class GenerationFields:
    """What completions and chats have in common.

    options: those of SamplingOptions but for max_new_tokens and stop_ids. stop_ids: besides the model's own, which
    ignore_eos leaves out. logprobs: the number of alternatives to each token, None for no log-probabilities.
    """

    model: str | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    max_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True)
class CompletionFields(GenerationFields):
    """A request for /v1/completions. prompts: texts or token ids."""

    prompts: list[str | list[int]]
    echo: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, kw_only=True)
class ChatFields(GenerationFields):
    """A request for /v1/chat/completions.

    json_schema: the schema that the answer must follow; True allows any JSON object, None any text. tools: functions
    that the model may call; None for no calls.
    """

    messages: list[dict[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    json_schema: Mapping[str, Any] | bool | None = None
    tools: Tools | None = None
    tool_syntax: ToolSyntax | None = None  # that of the model; set once its chat template is known


def read_fields(body: Any, table: Table) -> dict[str, Any]:
    """Return the fields that are given and not null. Raise ApiError for missing, wrong, refused or misspelled ones.

    A field that is not in the table, such as a new one of OpenAI's API, is left out, and the log says so.
    """
    if not isinstance(body, dict):
        raise invalid(f"the body of the request is {quote(body)}; it must be a JSON object")
    for name in body:
        if name not in table:
            _report_unknown(name, table)
    missing = next((name for name, each in table.items() if each.required and body.get(name) is None), None)
    if missing is not None:
        raise invalid(f"{missing} is missing; give {describe(table[missing].schema)}", missing, "missing_parameter")
    found = {}
    for name, value in body.items():
        if value is None or name not in table:
            continue
        try:
            found[name] = check_value(value, table[name].schema, name)
        except ApiError as error:
            if table[name].unsupported is None:
                raise
            raise invalid(_refusal(name, table), name, "unsupported_parameter") from error
    return found


def _report_unknown(name: str, table: Table) -> None:
    """Log that a field is ignored, once per name. Raise ApiError if it is a known name with a spelling mistake."""
    if get_close_matches(name[:_MAX_NAME], table, n=1, cutoff=_MISSPELLED):
        raise invalid(str(unknown_name("field", name, table)), param=name[:_MAX_NAME], code="unknown_parameter")
    if name not in _REPORTED and len(_REPORTED) < _MAX_REPORTED:
        _REPORTED.add(name)
        _LOGGER.warning("requests have the unknown field %s, which is ignored", quote(name[:_MAX_NAME]))


def _refusal(name: str, table: Table) -> str:
    allowed = [json.dumps(value) for value in table[name].schema.get("enum", [])]
    instead = f"leave it out{' or set it to ' + ' or '.join(allowed) if allowed else ''}"
    return f"{name} is not supported, because {table[name].unsupported}; {instead}"


def read_completion(body: Any, limits: Limits, vocab_size: int) -> CompletionFields:
    """Return a request for /v1/completions."""
    found = read_fields(body, completion_fields(limits))
    n = found.get("n", 1)
    if found.get("best_of", n) != n:
        raise invalid(f"best_of is {found['best_of']}; only the value of n, {n}, is supported", "best_of")
    max_tokens = found.get("max_tokens", _DEFAULT_COMPLETION_TOKENS)
    return CompletionFields(
        **common_fields(found, vocab_size, max_tokens),
        prompts=split_prompts(found["prompt"]),
        echo=found.get("echo", False),
        add_special_tokens=found.get("add_special_tokens", True),
        logprobs=found.get("logprobs"),
    )


def read_chat(body: Any, limits: Limits, vocab_size: int) -> ChatFields:
    """Return a request for /v1/chat/completions."""
    found = read_fields(body, chat_fields(limits))
    names = ("max_completion_tokens", "max_tokens")
    given = [name for name in names if name in found]
    if len(given) == 2 and found[given[0]] != found[given[1]]:
        raise invalid("max_tokens and max_completion_tokens differ; give only one of them", "max_tokens")
    if "top_logprobs" in found and not found.get("logprobs"):
        raise invalid("top_logprobs needs logprobs: true; add it", "top_logprobs")
    return ChatFields(
        **common_fields(found, vocab_size, found[given[0]] if given else None),
        messages=plain_messages(found["messages"]),
        variables=template_variables(found),
        add_generation_prompt=found.get("add_generation_prompt", True),
        logprobs=found.get("top_logprobs", 0) if found.get("logprobs") else None,
        json_schema=read_json_schema(found.get("response_format"), limits, "response_format"),
        tools=read_tools(found),
    )


def common_fields(found: Mapping[str, Any], vocab_size: int, max_tokens: int | None) -> dict[str, Any]:
    """Return the fields that GenerationFields has, but for logprobs."""
    stream, stream_options = found.get("stream", False), found.get("stream_options")
    if stream_options is not None and not stream:
        raise invalid("stream_options needs stream: true; add it or leave stream_options out", "stream_options")
    if found.get("min_tokens", 0) > (max_tokens if max_tokens is not None else found.get("min_tokens", 0)):
        raise invalid(f"min_tokens is {found['min_tokens']}; it must not exceed max_tokens, {max_tokens}", "min_tokens")
    options = {option: found[name] for name, option in _OPTIONS.items() if name in found}
    if found.get("top_k", 0) > 0:
        options["top_k"] = found["top_k"]
    if found.get("logit_bias"):
        options["logit_bias"] = _logit_bias(found["logit_bias"], vocab_size)
    usage = stream_options or {}
    return {
        "model": found.get("model"),
        "n": found.get("n", 1),
        "stream": stream,
        "include_usage": bool(usage.get("include_usage") or usage.get("continuous_usage_stats")),
        "continuous_usage": bool(usage.get("continuous_usage_stats")),
        "max_tokens": max_tokens,
        "options": {"temperature": 1.0, **options},
        "stop_ids": tuple(_in_vocabulary(found.get("stop_token_ids", ()), vocab_size)),
        "ignore_eos": found.get("ignore_eos", False),
        "cache_salt": found.get("cache_salt", ""),
    }


def _in_vocabulary(ids: Any, vocab_size: int) -> Any:
    for token in ids:
        if token >= vocab_size:
            message = f"stop_token_ids contains {token}; the vocabulary has the ids 0 to {vocab_size - 1}"
            raise invalid(message, "stop_token_ids")
    return ids


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Return biases by token id. JSON has texts as keys."""
    biases: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocab_size):
            message = f"logit_bias has the key {quote(key)}; a key is a token id from 0 to {vocab_size - 1}"
            raise invalid(message, "logit_bias")
        if int(key) in biases:
            raise invalid(f"logit_bias has the token {int(key)} twice; give it one bias", "logit_bias")
        biases[int(key)] = float(value)
    return biases


def read_json_schema(given: Mapping[str, Any] | None, limits: Limits, param: str) -> Mapping[str, Any] | bool | None:
    """Return the schema of a response format; True for any JSON object, None for text."""
    if given is None or given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return True
    schema = (given.get("json_schema") or {}).get("schema")
    if schema is None:
        raise invalid(f"{param} has no schema; give a JSON schema", param)
    if len(str(schema)) > limits.max_schema_characters:
        message = f"the JSON schema has more than {limits.max_schema_characters} characters; send a smaller one"
        raise invalid(message, param)
    if schema is False:
        raise invalid("the JSON schema allows no answer; send another one", param)
    return {} if schema is True else dict(schema)


def split_prompts(given: Any) -> list[str | list[int]]:
    """Return a list of texts or of lists of token ids from any of the four forms of a prompt."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    return list(given)


def template_variables(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the variables of chat_template_kwargs; those that the renderer sets itself cannot be replaced."""
    variables: Mapping[str, Any] = found.get("chat_template_kwargs", {})
    reserved = next((name for name in variables if name in _RESERVED), None)
    if reserved is not None:
        raise invalid(
            f"chat_template_kwargs has {reserved}, which the server sets itself; leave it out", "chat_template_kwargs"
        )
    return variables
