"""Messages of the assistant that may contain tool calls, complete and as deltas; and what plans need for them.

message = MessageReader(asked); data = message.complete(text)
"""

import json
from collections.abc import Mapping
from typing import Any

from clearhead.server.api_errors import invalid
from clearhead.server.fields import ChatFields
from clearhead.server.service import Service
from clearhead.server.structured_output import GrammarFilter
from clearhead.server.token_scores import TokenScore
from clearhead.server.tool_fields import Tools
from clearhead.server.tool_readers import Part, ToolCall, ToolReader
from clearhead.server.tool_syntax import ToolSyntax, find_syntax


def model_syntax(service: Service) -> ToolSyntax:
    """Return how the model writes calls. Raise ApiError if its chat template does not show it."""
    syntax = find_syntax(service.tokenizer.chat_template or "") if service.model.has_chat_template else None
    if syntax is None:
        reason = "the chat template of this model has no tools, or calls in an unknown format"
        raise invalid(f"tools is not supported, because {reason}; leave it out", "tools", "unsupported_parameter")
    return syntax


def special_markers(service: Service, syntax: ToolSyntax) -> dict[int, str]:
    """Return the markers of calls that are special tokens, by their id; others are text anyway."""
    found = {}
    for marker in syntax.markers:
        ids = service.tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) == 1 and ids[0] in service.tokenizer.special_ids:
            found[ids[0]] = marker
    return found


def call_filters(service: Service, tools: Tools, syntax: ToolSyntax, special: Mapping[int, str]) -> list[GrammarFilter]:
    """Return the filter of an answer that must call; none if the model decides whether to call."""
    if not tools.must_call:
        return []
    ids = {marker: token for token, marker in special.items()}
    grammar = syntax.grammar(
        tools.schemas, tools.at_most_one, lambda text: f"<[{ids[text]}]>" if text in ids else json.dumps(text)
    )
    if len(grammar) > service.settings.limits.max_schema_characters:
        raise invalid("the parameters of all tools are too large for tool_choice required; send fewer tools", "tools")
    return [service.grammars.lark_filter(grammar, "tool_choice")]


class MessageReader:
    """Turns the text of one choice into the message of an assistant."""

    def __init__(self, asked: ChatFields):
        self.scores: list[TokenScore] = []  # scores of tokens that have not been sent in a delta yet
        self._reader: ToolReader | None = None
        if asked.tools is not None and asked.tool_syntax is not None:
            self._reader = asked.tool_syntax.reader(asked.tools.schemas, asked.tools.at_most_one)

    def complete(self, text: str) -> dict[str, Any]:
        """Return the message of a text that has ended."""
        parts = self._parts(text, is_end=True)
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [part for part in parts if isinstance(part, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [_call_data(call) for call in calls]}
        return message

    def deltas(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        """Return what a piece of the text adds to the message. A call has two deltas: its name, its arguments."""
        deltas: list[dict[str, Any]] = []
        number = 0 if self._reader is None else self._reader.num_calls
        for part in self._parts(text, is_end):
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            start = {"index": number, **_call_data(part)}
            start["function"] = {"name": part.name, "arguments": ""}
            deltas.append({"tool_calls": [start]})
            deltas.append({"tool_calls": [{"index": number, "function": {"arguments": part.arguments}}]})
            number += 1
        return deltas

    def take_scores(self) -> list[TokenScore]:
        """Return the scores that no delta has had yet."""
        scores, self.scores = self.scores, []
        return scores

    def finish_reason(self, reason: str) -> str:
        """Return the reason why the message ended."""
        has_calls = self._reader is not None and self._reader.num_calls > 0
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _parts(self, text: str, is_end: bool) -> list[Part]:
        if self._reader is None:
            return [text] if text else []
        return self._reader.push(text) + (self._reader.finish() if is_end else [])


def _call_data(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
