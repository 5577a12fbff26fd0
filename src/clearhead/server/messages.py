"""From the messages of a request to those that chat templates expect. Without HTTP.

messages = plain_messages([{"role": "developer", "content": [{"type": "text", "text": "Be kind."}]}])
"""

import json
from typing import Any

from clearhead.server.api_errors import invalid


def plain_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    The parts of a content are joined, developers are system, and the arguments of calls are objects. Raise ApiError for
    a message without content, unless it has calls.
    """
    return [_plain_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _plain_message(message: dict[str, Any], param: str) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not calls:
        raise invalid(f"{param}.content is missing; give a text", f"{param}.content")
    if calls and message["role"] != "assistant":
        raise invalid(f"{param}.tool_calls is for messages of the assistant; leave it out", f"{param}.tool_calls")
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content or [])
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {name: value for name, value in message.items() if value is not None}
    if calls:
        plain["tool_calls"] = [_plain_call(call, f"{param}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return {**plain, "role": role, "content": content}


def _plain_call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a call whose arguments are an object instead of its JSON text, since templates write it themselves."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where = f"{param}.function.arguments"
        raise invalid(f"{where} must be a JSON object as text; send it as the model returned it", where)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
