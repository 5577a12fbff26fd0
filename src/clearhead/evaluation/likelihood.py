"""Compute the log-probability of continuations after their contexts, for many requests in batches.

    request = encode_request("The capital of France is", " Paris", tokenizer)
    (likelihood,) = log_likelihoods(network, [request]); likelihood.logprob, likelihood.is_greedy

Requests of similar length are read in one batch. A context that several requests share is read once:

    context[:-1]                    -> cache, copied for each continuation
    context[-1] + continuation[:-1] -> hidden states -> logits of these tokens only -> log p of the continuation

Sequences are padded on the right without a mask, since no token attends to the tokens after it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.architecture import check_tokens
from clearhead.cache import KeyValueCache, forward_hidden
from clearhead.errors import ClearheadError
from clearhead.evaluation.result import Progress
from clearhead.generation import check_can_score, explain_out_of_memory, pad_left, pad_right
from clearhead.model import Transformer
from clearhead.tokenization import Tokenizer

BATCH_TOKENS = 8192
LOGITS_CHUNK = 256  # positions at once: with a vocabulary of 256 thousand, the largest common one, they take 256 MiB


@dataclass(frozen=True)
class Request:
    """Token ids of a context and of a continuation to score after it; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.context, "the first token of a continuation needs one before it"
        assert self.continuation

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)

    def truncate(self, max_tokens: int) -> "Request":
        """Drop the beginning of the context so that the network reads at most `max_tokens`.

        The last token of the continuation is predicted but not read.
        """
        if len(self.continuation) > max_tokens:
            raise ClearheadError(
                f"a continuation has {len(self.continuation)} tokens, but this model reads at most {max_tokens}"
            )
        return replace(self, context=self.context[-(max_tokens + 1 - len(self.continuation)) :])


@dataclass(frozen=True)
class Likelihood:
    """The log-probability of a continuation."""

    logprobs: tuple[float, ...]  # of each token of the continuation, in nats
    is_greedy: bool  # whether each of them is the most likely token

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.logprobs)


def encode_request(context: str, continuation: str, tokenizer: Tokenizer) -> Request:
    """Tokenize the whole text and split it after the context; spaces at the end of the context go to the continuation.

    This is the split of lm-evaluation-harness, so that its numbers can be compared.
    """
    context_ids = tokenizer.encode(context.rstrip())
    continuation_ids = tokenizer.encode(context + continuation)[len(context_ids) :]
    if not continuation_ids:
        raise ClearheadError(f"the continuation {continuation!r} adds no tokens to its context; give a longer one")
    return Request(tuple(context_ids) or (start_token(tokenizer),), tuple(continuation_ids))


def start_token(tokenizer: Tokenizer) -> int:
    """Return the token before a text without context: the beginning-of-text token, or else the end-of-text token."""
    token = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if token is None:
        raise ClearheadError(
            "a text without context needs a beginning-of-text or end-of-text token; this tokenizer has neither"
        )
    return token


@torch.inference_mode()
def log_likelihoods(
    network: Transformer,
    requests: Sequence[Request],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[Likelihood]:
    """Return the likelihood of each request, in the order of the requests."""
    check_can_score(network.config)
    for request in requests:
        check_tokens((*request.context, *request.continuation[:-1]), network.config.output_stack)
        check_tokens(request.continuation[-1:], network.config.output_stack)
    likelihoods: dict[int, Likelihood] = {}
    with explain_out_of_memory():
        for indices in make_batches(requests, batch_tokens):
            batch = [requests[index] for index in indices]
            likelihoods |= zip(indices, _score_batch(network, batch), strict=True)
            if progress is not None:
                progress(len(likelihoods), len(requests))
    return [likelihoods[index] for index in range(len(requests))]


def make_batches(requests: Sequence[Request], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of requests that have at most `batch_tokens` tokens when padded, with equal contexts adjacent.

    The longest come first, so that running out of memory shows at once.
    """
    max_length: dict[tuple[int, ...], int] = {}  # of the requests with this context
    for request in requests:
        max_length[request.context] = max(max_length.get(request.context, 0), len(request))
    contexts = [request.context for request in requests]
    ordered = sorted(range(len(requests)), key=lambda index: (-max_length[contexts[index]], contexts[index], index))
    batch: list[int] = []
    for index in ordered:
        if batch and (len(batch) + 1) * max_length[contexts[batch[0]]] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score_batch(network: Transformer, requests: Sequence[Request]) -> list[Likelihood]:
    """Return the likelihoods of one batch; contexts are shared if some are equal and longer than one token."""
    num_contexts = len({request.context for request in requests})
    share = num_contexts < len(requests) and all(len(request.context) > 1 for request in requests)
    states = torch.cat(_shared_context_states(network, requests) if share else _full_states(network, requests))
    targets = torch.tensor([token for request in requests for token in request.continuation], device=network.device)
    logprobs: list[float] = []
    is_most_likely: list[bool] = []
    for start in range(0, len(states), LOGITS_CHUNK):
        chunk = targets[start : start + LOGITS_CHUNK]
        logits = network.compute_logits(states[start : start + LOGITS_CHUNK]).float()
        logprobs += logits.log_softmax(dim=-1).gather(1, chunk[:, None])[:, 0].tolist()
        is_most_likely += (logits.argmax(dim=-1) == chunk).tolist()
    ends = torch.tensor([len(request.continuation) for request in requests]).cumsum(0).tolist()
    spans = [slice(end - len(request.continuation), end) for request, end in zip(requests, ends, strict=True)]
    return [Likelihood(tuple(logprobs[span]), all(is_most_likely[span])) for span in spans]


def _full_states(network: Transformer, requests: Sequence[Request]) -> list[Tensor]:
    """Return the hidden states (T, D) that predict each continuation, reading every request from its start."""
    sequences = [(*request.context, *request.continuation[:-1]) for request in requests]
    hidden = network.hidden_states(pad_right(sequences, network.device)[0])
    starts = [len(request.context) - 1 for request in requests]
    return [hidden[index, start : len(sequences[index])] for index, start in enumerate(starts)]


def _shared_context_states(network: Transformer, requests: Sequence[Request]) -> list[Tensor]:
    """Return the hidden states (T, D) that predict each continuation, reading every distinct context once."""
    rows: dict[tuple[int, ...], int] = {}
    for request in requests:
        rows.setdefault(request.context, len(rows))
    cache = KeyValueCache(network.config)
    tokens, mask = pad_left([list(context[:-1]) for context in rows], network.device)
    forward_hidden(network, tokens, cache, mask, absorb=False)
    cache = cache.select(torch.tensor([rows[request.context] for request in requests], device=network.device))
    sequences = [(request.context[-1], *request.continuation[:-1]) for request in requests]
    hidden = network.hidden_states(pad_right(sequences, network.device)[0], cache=cache)
    return [hidden[index, : len(sequence)] for index, sequence in enumerate(sequences)]
