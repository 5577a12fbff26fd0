"""Conversations as files: one JSON object in the messages format, on one line.

    write_conversation(Path("talk.json"), messages); messages = read_conversation(Path("talk.json"))

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}

Because a conversation is one line, several files joined together are a JSON lines file for training.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, quote
from clearhead.files import read_json, write_text

ROLES = ("system", "user", "assistant")
_FORMAT = '{"messages": [{"role": "user", "content": "Hi"}]}'


def read_conversation(path: Path) -> list[dict[str, str]]:
    """Return the messages of a file that `write_conversation` wrote. Raise ClearheadError for anything else."""
    content = read_json(path)
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise ClearheadError(f"{path} is not a conversation; it must have the form {_FORMAT}")
    return [_check_message(message, number, path) for number, message in enumerate(messages, start=1)]


def _check_message(message: Any, number: int, path: Path) -> dict[str, str]:
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ClearheadError(f"message {number} of {path} is not an object with a role and a content, both texts")
    if message["role"] not in ROLES:
        role = quote(message["role"])
        raise ClearheadError(f"message {number} of {path} has the role {role}; it must be {' or '.join(ROLES)}")
    if message["role"] == "system" and number > 1:
        raise ClearheadError(f"message {number} of {path} is a system message; only the first one can be")
    if extra := next((key for key in message if key not in ("role", "content")), None):
        raise ClearheadError(f"message {number} of {path} has the key {quote(extra)}; use only role and content")
    return {"role": message["role"], "content": message["content"]}


def write_conversation(path: Path, messages: Sequence[Mapping[str, str]]) -> None:
    """Write messages to a file, atomically."""
    try:
        write_text(path, json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ClearheadError(f"{path} cannot be written: {error.strerror or error}") from None
