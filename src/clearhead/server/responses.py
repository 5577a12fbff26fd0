"""/v1/responses: the part that needs no memory of earlier requests. Objects in, objects out, without HTTP.

asked, plan = plan_response(service, body, salt); data = ResponseFormat(head, asked).complete(texts, usage)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clearhead.server.answers import AnswerHead, CompleteText, new_id
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.chat import plan_messages
from clearhead.server.choice import Piece
from clearhead.server.fields import ChatFields, common_fields, read_fields, read_json_schema
from clearhead.server.job import Plan, Usage
from clearhead.server.json_text import parse_json
from clearhead.server.messages import plain_messages
from clearhead.server.response_schemas import response_fields
from clearhead.server.service import Service


@dataclass(frozen=True, kw_only=True)
class ResponseFields(ChatFields):
    """A request for /v1/responses. given: its fields, which the answer repeats."""

    given: Mapping[str, Any] = field(default_factory=dict)


def plan_response(service: Service, body: bytes, salt: bytes) -> tuple[ResponseFields, Plan]:
    """Return what a request asks for, and its text."""
    limits = service.settings.limits
    found = read_fields(parse_json(body), response_fields(limits))
    service.check_model(found.get("model"))
    asked = ResponseFields(
        **common_fields(found, service.model.config.vocab_size, found.get("max_output_tokens")),
        messages=_messages(found),
        json_schema=read_json_schema(_text_format(found), limits, "text.format"),
        given=found,
    )
    return asked, plan_messages(service, asked, salt)


def _messages(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the instructions and the input as messages of a chat."""
    given = found["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages = [{"role": item["role"], "content": item["content"]} for item in items]
    if "instructions" in found:
        messages.insert(0, {"role": "system", "content": found["instructions"]})
    if not messages:
        raise invalid("input is empty; give a text or at least one message", "input")
    return plain_messages(messages)


def _text_format(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the format of the text in the form that chats have: there, a schema is one level deeper."""
    given = found.get("text", {}).get("format")
    if given is None or given["type"] != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


class ResponseFormat:
    """Objects of the kind response, and the named events of its stream."""

    ending = b""  # response.completed is the last event

    def __init__(self, head: AnswerHead, asked: ResponseFields):
        self._head, self._asked = head, asked
        self._message_id = new_id("msg")
        self._num_events = 0
        self._text: CompleteText | None = None

    def complete(self, texts: list[CompleteText], usage: Usage) -> dict[str, Any]:
        """Return the answer to a request without stream."""
        (text,) = texts
        is_whole = text.finish_reason == "stop"
        return self._response("completed" if is_whole else "incomplete", [self._message(text)], usage)

    # --- streams

    def chunks(self, piece: Piece, usage: Usage) -> list[dict[str, Any]]:
        """Return the events of a stream for a piece of the text."""
        events: list[dict[str, Any]] = []
        if self._text is None:
            self._text = CompleteText()
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {**self._message(self._text), "status": "in_progress", "content": []}
            events += [
                self._event("response.created", response=self._response("in_progress", [], None)),
                self._event("response.in_progress", response=self._response("in_progress", [], None)),
                self._event("response.output_item.added", output_index=0, item=item),
                self._text_event("response.content_part.added", part=part),
            ]
        self._text.add(piece)
        if piece.text:
            events.append(self._text_event("response.output_text.delta", delta=piece.text, logprobs=[]))
        return events

    def text_chunk(self, index: int, text: str, usage: Usage) -> None:
        """Return None: events have numbers."""

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the events that end the text and the response."""
        assert self._text is not None
        message = self._message(self._text)
        response = self.complete([self._text], usage)
        return [
            self._text_event("response.output_text.done", text=self._text.text, logprobs=[]),
            self._text_event("response.content_part.done", part=message["content"][0]),
            self._event("response.output_item.done", output_index=0, item=message),
            self._event(f"response.{response['status']}", response=response),
        ]

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": name, "sequence_number": self._num_events - 1, **fields}

    def _text_event(self, name: str, **fields: Any) -> dict[str, Any]:
        return self._event(name, item_id=self._message_id, output_index=0, content_index=0, **fields)

    # --- objects

    def _message(self, text: CompleteText) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "status": "completed" if text.finish_reason == "stop" else "incomplete",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text.text, "annotations": [], "logprobs": []}],
        }

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        given = self._asked.given
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "model": self._head.model,
            "output": output,
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self._asked.options["temperature"],
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": given.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": given.get("user"),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.num_cached_tokens,
            "cache_write_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        },
        "output_tokens": usage.num_new_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_new_tokens,
    }
