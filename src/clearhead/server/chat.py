"""/v1/chat/completions: from the body of a request to a plan, and from texts to the answer. Without HTTP.

asked, plan = plan_chat(service, body, salt); data = ChatFormat(head, asked).complete(texts, usage)
"""

from dataclasses import replace
from typing import Any

from clearhead.server.answers import DONE, AnswerHead, CompleteText
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.choice import Piece
from clearhead.server.fields import ChatFields, read_chat
from clearhead.server.job import Plan, Usage
from clearhead.server.json_text import parse_json
from clearhead.server.prompts import encode_messages, plan_texts
from clearhead.server.service import Service
from clearhead.server.token_scores import TokenScore, TokenText
from clearhead.server.tool_messages import MessageReader, call_filters, model_syntax, special_markers


def plan_chat(service: Service, body: bytes, salt: bytes) -> tuple[ChatFields, Plan]:
    """Return what a request asks for, and its n texts."""
    asked = read_chat(parse_json(body), service.settings.limits, service.model.config.vocab_size)
    service.check_model(asked.model)
    if asked.tools is not None:
        asked = replace(asked, tool_syntax=model_syntax(service))
    return asked, plan_messages(service, asked, salt)


def plan_messages(service: Service, asked: ChatFields, salt: bytes) -> Plan:
    """Return the texts that continue a conversation."""
    tools = None if asked.tools is None else asked.tools.definitions
    ids = encode_messages(service, asked.messages, asked.variables, asked.add_generation_prompt, tools)
    filters = [] if asked.json_schema is None else [service.grammars.json_filter(asked.json_schema)]
    visible: dict[int, str] = {}
    if asked.tools is not None and asked.tool_syntax is not None:
        visible = special_markers(service, asked.tool_syntax)
        filters += call_filters(service, asked.tools, asked.tool_syntax, visible)
        if asked.json_schema is not None:
            raise invalid("response_format excludes tools; leave one of them out", "response_format")
    if filters and asked.ignore_eos:
        message = "ignore_eos excludes response_format and required tool calls, which end the text; leave it out"
        raise invalid(message, "ignore_eos")
    token_filter = filters[0] if filters else None
    return Plan(plan_texts(service, ids, asked, salt, token_filter=token_filter), len(ids), visible=visible)


class ChatFormat:
    """Objects of the kinds chat.completion and chat.completion.chunk."""

    def __init__(self, head: AnswerHead, asked: ChatFields):
        self._head, self._asked = head, asked
        self._begun: set[int] = set()
        self._messages: dict[int, MessageReader] = {}

    @property
    def ending(self) -> bytes:
        """What ends a stream."""
        return DONE

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body

    def chunks(self, piece: Piece, usage: Usage) -> list[dict[str, Any]]:
        """Return the events of a stream for a piece: the role first, then the text, at the end an empty delta."""
        message = self._messages.setdefault(piece.index, MessageReader(self._asked))
        message.scores += [score for score in piece.scores if not score.is_special]
        deltas: list[tuple[dict[str, Any], list[TokenScore], str | None]] = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            deltas.append(({"role": "assistant", "content": ""}, [], None))
        for delta in message.deltas(piece.text, piece.finish_reason is not None):
            deltas.append((delta, message.take_scores(), None))
        if piece.finish_reason is not None:
            deltas.append(({}, message.take_scores(), message.finish_reason(piece.finish_reason)))
        return [self._chunk(piece.index, *delta, usage) for delta in deltas]

    def text_chunk(self, index: int, text: str, usage: Usage) -> dict[str, Any] | None:
        """Return the event of a piece that is only text; None if it may call tools or has log-probabilities."""
        if self._asked.tools is not None or self._asked.logprobs is not None:
            return None
        return self._chunk(index, {"content": text}, [], None, usage)

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the event with the numbers of tokens, if it was asked for."""
        if not self._asked.include_usage:
            return []
        return [{**self._head.as_data("chat.completion.chunk"), "choices": [], "usage": usage.as_data()}]

    def complete(self, texts: list[CompleteText], usage: Usage) -> dict[str, Any]:
        """Return the answer to a request without stream."""
        choices = [self._choice(index, text) for index, text in enumerate(texts)]
        return {**self._head.as_data("chat.completion"), "choices": choices, "usage": usage.as_data()}

    def _choice(self, index: int, text: CompleteText) -> dict[str, Any]:
        message = MessageReader(self._asked)
        return {
            "index": index,
            "message": message.complete(text.text),
            "logprobs": self._logprobs([score for score in text.scores if not score.is_special]),
            "finish_reason": message.finish_reason(text.finish_reason),
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        scores: list[TokenScore],
        finish_reason: str | None,
        usage: Usage | None,
    ) -> dict[str, Any]:
        logprobs = self._logprobs(scores) if scores else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        data = {**self._head.as_data("chat.completion.chunk"), "choices": [choice]}
        if self._asked.include_usage:
            data["usage"] = usage.as_data() if usage is not None and self._asked.continuous_usage else None
        return data

    def _logprobs(self, scores: list[TokenScore]) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        return {"content": [_chat_score(score) for score in scores], "refusal": None}


def _chat_score(score: TokenScore) -> dict[str, Any]:
    """Return a token with its log-probability, its bytes and its alternatives."""
    return {
        **_token(score.token, score.logprob),
        "top_logprobs": [_token(token, logprob) for token, logprob in score.alternatives],
    }


def _token(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.content)}
