"""Perplexity of a text: exp of the mean of -log p of its tokens, read through windows; and the bits that a byte takes.

    perplexity(model, text, context=1024, stride=512)["perplexity"]

    tokens    0 1 2 3 4 5 6 7 8 9        context 4, stride 2
    windows  [0|1 2 3]                   left of the bar: read; right of it: read and scored
                 [2 3|4 5]
                     [4 5|6 7]
                         [6 7|8 9]

The windows of the fixed-length recipe in transformers' documentation. Each token but the first is scored once, after
at least context - stride others. Where stride equals context, the first of every window has none before it and is not
scored; its bytes are not counted either.
"""

import math
from collections.abc import Iterator, Sequence

from clearhead.api import Model
from clearhead.errors import ClearheadError
from clearhead.evaluation.likelihood import BATCH_TOKENS, Request, check_reads_alone, log_likelihoods
from clearhead.evaluation.result import Measure, Progress, Result, exponential, rate
from clearhead.generation import require_tokenizer
from clearhead.tokenization import Tokenizer


def perplexity(
    model: Model,
    text: str,
    context: int | None = None,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Result:
    """`context`: that of the model; `stride`: half of it. A window is an example of the standard error."""
    check_reads_alone(model.config)
    context = model.config.context if context is None else context
    stride = max(context // 2, 1) if stride is None else stride
    tokenizer = require_tokenizer(model.tokenizer)
    ids = tokenizer.encode(text)
    spans = list(windows(len(ids), context, stride))
    requests = [Request(tuple(ids[begin:first]), tuple(ids[first:end])) for begin, first, end in spans]
    found = log_likelihoods(model.network, requests, batch_tokens, progress)
    counts = [len(request.continuation) for request in requests]
    nats = rate("nats_per_token", [-one.logprob for one in found], counts)
    num_bytes = bytes_scored(text, ids, spans, tokenizer)
    tokens_per_byte = sum(counts) / num_bytes
    bits = Measure(
        "bits_per_byte",
        nats.value * tokens_per_byte / math.log(2),
        None if nats.standard_error is None else nats.standard_error * tokens_per_byte / math.log(2),
    )
    settings = {"context": context, "stride": stride, "tokens": sum(counts), "bytes": num_bytes}
    return Result("perplexity", len(requests), (exponential("perplexity", nats), bits), settings)


def windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first, end) of each: tokens from `begin` are read, those from `first` to `end` scored."""
    if context < 2:
        raise ClearheadError(f"context is {context}; a window takes 2 tokens or more")
    if not 1 <= stride <= context:
        raise ClearheadError(f"stride is {stride}; it must be from 1 to the context, {context}, or tokens are left out")
    if num_tokens < 2:
        raise ClearheadError(f"a text of {num_tokens} tokens has no perplexity; it takes two or more")
    previous_end = 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + context, num_tokens)
        first = max(previous_end, begin + 1)
        if first < end:
            yield begin, first, end
        if end == num_tokens:
            return
        previous_end = end


def bytes_scored(text: str, ids: Sequence[int], spans: Sequence[tuple[int, int, int]], tokenizer: Tokenizer) -> int:
    scored = {place for _, first, end in spans for place in range(first, end)}
    num_bytes = len(text.encode())
    for place, token in enumerate(ids):
        if place not in scored and token not in tokenizer.special_ids:
            num_bytes -= len(tokenizer.token_bytes(token, after=ids[place - 1] if place else None))
    if num_bytes == 0:
        raise ClearheadError("nothing of this text is scored: all after its first token are special tokens")
    return num_bytes
