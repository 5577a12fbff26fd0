"""/v1/completions: from the body of a request to a plan, and from texts to the answer. Without HTTP.

asked, plan = plan_completion(service, body, salt); data = CompletionFormat(head, asked).complete(texts, usage)
"""

from collections.abc import Sequence
from typing import Any

from clearhead.server.answers import DONE, AnswerHead, CompleteText
from clearhead.server.api_errors import ApiError, invalid
from clearhead.server.choice import FinishReason, Piece
from clearhead.server.fields import CompletionFields, read_completion
from clearhead.server.job import Plan, Usage
from clearhead.server.json_text import parse_json
from clearhead.server.prompts import encode_text, plan_texts
from clearhead.server.service import Service
from clearhead.server.token_scores import TokenScore


def plan_completion(service: Service, body: bytes, salt: bytes) -> tuple[CompletionFields, Plan]:
    """Return what a request asks for, and its texts: n for each prompt, in the order of the prompts."""
    asked = read_completion(parse_json(body), service.settings.limits, service.model.config.vocab_size)
    service.check_model(asked.model)
    if asked.echo and service.model.config.is_encoder_decoder:
        raise invalid("echo is not supported for encoder-decoders, whose text does not continue the prompt", "echo")
    prompts = [encode_text(service, prompt, asked.add_special_tokens) for prompt in asked.prompts]
    scores_prompt = asked.echo and asked.logprobs is not None
    requests = [
        request for ids in prompts for request in plan_texts(service, ids, asked, salt, scores_prompt=scores_prompt)
    ]
    echoes: list[str | None] = []
    if asked.echo:
        pairs = zip(asked.prompts, prompts, strict=True)
        echoes = [echo for prompt, ids in pairs for echo in [_echo(service, prompt, ids)] * asked.n]
    return asked, Plan(requests, sum(map(len, prompts)), echoes)


def _echo(service: Service, prompt: str | list[int], ids: list[int]) -> str:
    """Return the text of a prompt; one of token ids is decoded."""
    if isinstance(prompt, str):
        return prompt
    return "" if service.model.tokenizer is None else service.model.tokenizer.decode(ids)


class CompletionFormat:
    """Objects of the kind text_completion."""

    def __init__(self, head: AnswerHead, asked: CompletionFields):
        self._head, self._asked = head, asked

    @property
    def ending(self) -> bytes:
        """What ends a stream."""
        return DONE

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the last event of a stream that fails."""
        return error.body

    def chunks(self, piece: Piece, usage: Usage) -> list[dict[str, Any]]:
        """Return the events of a stream for a piece of a text; none if it adds nothing."""
        if not piece.text and not piece.scores and piece.finish_reason is None:
            return []
        choice = self._choice(piece.index, piece.text, piece.scores, piece.finish_reason)
        return [self._object([choice], usage if self._asked.continuous_usage else None)]

    def text_chunk(self, index: int, text: str, usage: Usage) -> dict[str, Any] | None:
        """Return the event of a piece that is only text; None if log-probabilities are part of it."""
        if self._asked.logprobs is not None:
            return None
        choice = self._choice(index, text, [], None)
        return self._object([choice], usage if self._asked.continuous_usage else None)

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """Return the event with the numbers of tokens, if it was asked for."""
        return [self._object([], usage)] if self._asked.include_usage else []

    def complete(self, texts: list[CompleteText], usage: Usage) -> dict[str, Any]:
        """Return the answer to a request without stream."""
        choices = [self._choice(index, text.text, text.scores, text.finish_reason) for index, text in enumerate(texts)]
        return {**self._head.as_data("text_completion"), "choices": choices, "usage": usage.as_data()}

    def _object(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        data = {**self._head.as_data("text_completion"), "choices": choices}
        if self._asked.include_usage:
            data["usage"] = None if usage is None else usage.as_data()
        return data

    def _choice(
        self, index: int, text: str, scores: Sequence[TokenScore], finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = None if self._asked.logprobs is None else _logprobs(scores)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(scores: Sequence[TokenScore]) -> dict[str, Any]:
    return {
        "tokens": [score.token.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [_top(score) for score in scores],
        "text_offset": [score.offset for score in scores],
    }


def _top(score: TokenScore) -> dict[str, float] | None:
    """Return the most likely tokens and the chosen one; of tokens with the same text, the most likely counts."""
    if score.logprob is None:
        return None
    top: dict[str, float] = {}
    for token, logprob in [*score.alternatives, (score.token, score.logprob)]:
        top.setdefault(token.text, logprob)
    return top
