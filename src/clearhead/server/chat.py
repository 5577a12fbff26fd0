"""/v1/chat/completions: from the body of a request to a plan, and from texts to the answer. Without HTTP.

asked, plan = plan_chat(service, body, salt); data = ChatFormat(head, asked).complete(texts, usage)
"""

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


def plan_chat(service: Service, body: bytes, salt: bytes) -> tuple[ChatFields, Plan]:
    """Return what a request asks for, and its n texts."""
    asked = read_chat(parse_json(body), service.settings.limits, service.model.config.vocab_size)
    service.check_model(asked.model)
    return asked, plan_messages(service, asked, salt)


def plan_messages(service: Service, asked: ChatFields, salt: bytes) -> Plan:
    """Return the texts that continue a conversation."""
    ids = encode_messages(service, asked.messages, asked.variables, asked.add_generation_prompt)
    if asked.json_schema is not None and asked.ignore_eos:
        raise invalid("ignore_eos excludes response_format, whose text must be able to end", "ignore_eos")
    token_filter = None if asked.json_schema is None else service.grammars.json_filter(asked.json_schema)
    return Plan(plan_texts(service, ids, asked, salt, token_filter=token_filter), len(ids))


class ChatFormat:
    """Objects of the kinds chat.completion and chat.completion.chunk."""

    def __init__(self, head: AnswerHead, asked: ChatFields):
        self._head, self._asked = head, asked
        self._begun: set[int] = set()

    @property
    def ending(self) -> bytes:
        """What ends a stream."""
        return DONE

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body

    def chunks(self, piece: Piece, usage: Usage) -> list[dict[str, Any]]:
        """Return the events of a stream for a piece: the role first, then the text, at the end an empty delta."""
        scores = [score for score in piece.scores if not score.is_special]
        deltas: list[tuple[dict[str, Any], list[TokenScore], str | None]] = []
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            deltas.append(({"role": "assistant", "content": ""}, [], None))
        if piece.text:
            deltas.append(({"content": piece.text}, scores, None))
            scores = []
        if piece.finish_reason is not None:
            deltas.append(({}, scores, piece.finish_reason))
        return [self._chunk(piece.index, *delta, usage) for delta in deltas]

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the event with the numbers of tokens, if it was asked for."""
        if not self._asked.include_usage:
            return []
        return [{**self._head.as_data("chat.completion.chunk"), "choices": [], "usage": usage.as_data()}]

    def complete(self, texts: list[CompleteText], usage: Usage) -> dict[str, Any]:
        """Return the answer to a request without stream."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text.text, "refusal": None},
                "logprobs": self._logprobs([score for score in text.scores if not score.is_special]),
                "finish_reason": text.finish_reason,
            }
            for index, text in enumerate(texts)
        ]
        return {**self._head.as_data("chat.completion"), "choices": choices, "usage": usage.as_data()}

    def _chunk(
        self, index: int, delta: dict[str, Any], scores: list[TokenScore], finish_reason: str | None, usage: Usage
    ) -> dict[str, Any]:
        logprobs = self._logprobs(scores) if scores else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        data = {**self._head.as_data("chat.completion.chunk"), "choices": [choice]}
        if self._asked.include_usage:
            data["usage"] = usage.as_data() if self._asked.continuous_usage else None
        return data

    def _logprobs(self, scores: list[TokenScore]) -> dict[str, Any] | None:
        if self._asked.logprobs is None:
            return None
        return {"content": [chat_score(score) for score in scores], "refusal": None}


def chat_score(score: TokenScore) -> dict[str, Any]:
    """Return a token with its log-probability, its bytes and its alternatives."""
    return {
        **_token(score.token, score.logprob),
        "top_logprobs": [_token(token, logprob) for token, logprob in score.alternatives],
    }


def _token(token: TokenText, logprob: float | None) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.content)}
