"""Compute the perplexity of a text, exp of the mean of -log p of its tokens, and its bits per byte.

    result = evaluate_perplexity(model, text, context=1024, stride=512); result["perplexity"]

    tokens    0 1 2 3 4 5 6 7 8 9        context 4, stride 2
    windows  [0|1 2 3]                   left of the bar: read; right of it: read and scored
                 [2 3|4 5]
                     [4 5|6 7]
                         [6 7|8 9]

These are the windows of the fixed-length recipe in transformers' documentation. Each token but the first is scored
once, after at least context - stride others. If the stride equals the context, the first token of every window has none
before it and is not scored; its bytes are not counted either.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.evaluation.likelihood import BATCH_TOKENS, Request, log_likelihoods
from clearhead.evaluation.result import EvaluationResult, Metric, Progress, exponential_metric, ratio_metric
from clearhead.generation import Score, check_can_score, require_tokenizer
from clearhead.tokenization import Tokenizer


class Window(NamedTuple):
    """A window over a text: tokens from `start` are read, those from `first_scored` to `end` are scored."""

    start: int
    first_scored: int
    end: int


def evaluate_perplexity(
    model: Model,
    text: str,
    context: int | None = None,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> EvaluationResult:
    """Return the perplexity and the bits per byte of a text.

    context: tokens per window; None takes the context of the model. stride: tokens between the starts of windows; None
    takes half the context. batch_tokens: number of tokens to read at once. Windows are the examples of the standard
    error.
    """
    check_can_score(model.config)
    context = model.config.context if context is None else context
    stride = max(context // 2, 1) if stride is None else stride
    tokenizer = require_tokenizer(model.tokenizer)
    ids = tokenizer.encode(text)
    windows = list(make_windows(len(ids), context, stride))
    requests = [Request(tuple(ids[start:first]), tuple(ids[first:end])) for start, first, end in windows]
    likelihoods = log_likelihoods(model.network, requests, batch_tokens, progress)
    counts = [len(request.continuation) for request in requests]
    nats = ratio_metric("nats_per_token", [-likelihood.logprob for likelihood in likelihoods], counts)
    num_bytes = _count_scored_bytes(text, ids, windows, tokenizer)
    tokens_per_byte = sum(counts) / num_bytes
    bits = Metric(
        "bits_per_byte",
        nats.value * tokens_per_byte / math.log(2),
        None if nats.standard_error is None else nats.standard_error * tokens_per_byte / math.log(2),
    )
    settings = {"context": context, "stride": stride, "tokens": sum(counts), "bytes": num_bytes}
    metrics = (exponential_metric("perplexity", nats), bits)
    return EvaluationResult("perplexity", len(requests), metrics, settings)


def bits_per_byte(text: str, score: Score, tokenizer: Tokenizer) -> float:
    """Return the bits per byte of a text that was scored in one piece."""
    num_bytes = _count_scored_bytes(text, score.tokens, [Window(0, 1, len(score.tokens))], tokenizer)
    return -sum(score.logprobs) / math.log(2) / num_bytes


def make_windows(num_tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Yield the windows over a text of `num_tokens`."""
    if context < 2:
        raise ClearheadError(f"context is {context}; it must be at least 2 tokens")
    if not 1 <= stride <= context:
        raise ClearheadError(f"stride is {stride}; it must be from 1 to the context, {context}, to skip no tokens")
    if num_tokens < 2:
        raise ClearheadError(f"the number of tokens in the text is {num_tokens}; perplexity needs at least 2")
    previous_end = 0
    for start in range(0, num_tokens, stride):
        end = min(start + context, num_tokens)
        first_scored = max(previous_end, start + 1)
        if first_scored < end:
            yield Window(start, first_scored, end)
        if end == num_tokens:
            return
        previous_end = end


def _count_scored_bytes(text: str, ids: Sequence[int], windows: Sequence[Window], tokenizer: Tokenizer) -> int:
    """Return the number of UTF-8 bytes of the text that belong to scored tokens."""
    scored = {position for window in windows for position in range(window.first_scored, window.end)}
    num_bytes = len(text.encode())
    for position, token in enumerate(ids):
        if position not in scored and token not in tokenizer.special_ids:
            previous_id = ids[position - 1] if position else None
            num_bytes -= len(tokenizer.token_bytes(token, previous_id=previous_id))
    if num_bytes == 0:
        raise ClearheadError(
            "all tokens after the first are special tokens, which are not scored; give a text with other tokens"
        )
    return num_bytes
