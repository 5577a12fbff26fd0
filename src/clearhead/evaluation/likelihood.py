"""How likely a model finds a continuation after a context; many of them at once.

    request = encode_pair("The capital of France is", " Paris", tokenizer)
    (found,) = log_likelihoods(network, [request]); found.logprob, found.is_greedy

Requests of similar length go through the network together. A context that several of them share is read once:

    context[:-1]            -> cache, its row copied for each continuation
    context[-1] + continuation[:-1] -> hidden states -> logits of these alone -> log p of continuation

Rows are padded on the right without a mask: what follows a token is not seen by it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.architecture import ModelConfig
from clearhead.cache import KeyValueCache
from clearhead.errors import ClearheadError
from clearhead.evaluation.result import Progress
from clearhead.generation import check_tokens, explain_out_of_memory, pad_left, pad_right
from clearhead.model import Transformer
from clearhead.tokenization import Tokenizer

BATCH_TOKENS = 8192
LOGIT_ROWS = 256  # at once: with 256 thousand tokens, the largest common vocabulary, they take 256 MiB


@dataclass(frozen=True)
class Request:
    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.context, "the first token of a continuation needs one before it"
        assert self.continuation

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)

    def within(self, num_tokens: int) -> "Request":
        """What a network reads is at most `num_tokens` long (the last token is not read): the context's end stays."""
        if len(self.continuation) > num_tokens:
            raise ClearheadError(f"a continuation has {len(self.continuation)} tokens; this model reads {num_tokens}")
        return replace(self, context=self.context[-(num_tokens + 1 - len(self.continuation)) :])


@dataclass(frozen=True)
class Likelihood:
    logprobs: tuple[float, ...]  # of each token of the continuation, in nats
    is_greedy: bool  # whether each of them is the likeliest

    @property
    def logprob(self) -> float:
        return math.fsum(self.logprobs)


def check_reads_alone(config: ModelConfig) -> None:
    if config.decoder is None or config.is_encoder_decoder:
        raise ClearheadError("only a decoder alone can say how likely a text is; this model has an encoder")


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer) -> Request:
    """Tokens of the whole text, divided where the context's own tokens end; spaces there belong to what follows.

    The same division as lm-evaluation-harness makes, so that its numbers can be compared.
    """
    stripped = context.rstrip()
    before = tokenizer.encode(stripped)
    tokens = tokenizer.encode(context + continuation)[len(before) :]
    if not tokens:
        raise ClearheadError(f"the continuation {continuation!r} of a text has no tokens of its own")
    return Request(tuple(before) or (first_id(tokenizer),), tuple(tokens))


def first_id(tokenizer: Tokenizer) -> int:
    """What stands before a text without a context: its beginning, or the end of another."""
    found = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if found is None:
        raise ClearheadError(
            "a text without a context needs a token for its beginning or end; this vocabulary has none"
        )
    return found


@torch.inference_mode()
def log_likelihoods(
    network: Transformer,
    requests: Sequence[Request],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> list[Likelihood]:
    """One for each request, in their order."""
    check_reads_alone(network.config)
    for request in requests:
        check_tokens((*request.context, *request.continuation[:-1]), network.config.output_stack)
        check_tokens(request.continuation[-1:], network.config.output_stack)
    found: dict[int, Likelihood] = {}
    with explain_out_of_memory():
        for numbers in batches(requests, batch_tokens):
            batch = [requests[number] for number in numbers]
            found |= zip(numbers, read_batch(network, batch), strict=True)
            if progress is not None:
                progress(len(found), len(requests))
    return [found[number] for number in range(len(requests))]


def batches(requests: Sequence[Request], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of requests whose padded rows have at most `batch_tokens` tokens; equal contexts side by side.

    The longest come first: if memory is short, that is known at once.
    """
    longest: dict[tuple[int, ...], int] = {}
    for request in requests:
        longest[request.context] = max(longest.get(request.context, 0), len(request))
    contexts = [request.context for request in requests]
    ordered = sorted(range(len(requests)), key=lambda number: (-longest[contexts[number]], contexts[number], number))
    batch: list[int] = []
    for number in ordered:
        if batch and (len(batch) + 1) * longest[contexts[batch[0]]] > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def read_batch(network: Transformer, requests: Sequence[Request]) -> list[Likelihood]:
    num_contexts = len({request.context for request in requests})
    shares = num_contexts < len(requests) and all(len(request.context) > 1 for request in requests)
    states = torch.cat(states_of_shared(network, requests) if shares else states_of_whole(network, requests))
    targets = torch.tensor([token for request in requests for token in request.continuation], device=network.device)
    logprobs: list[float] = []
    likeliest: list[bool] = []
    for start in range(0, len(states), LOGIT_ROWS):
        wanted = targets[start : start + LOGIT_ROWS]
        logits = network.to_logits(states[start : start + LOGIT_ROWS]).float()
        logprobs += logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0].tolist()
        likeliest += (logits.argmax(dim=-1) == wanted).tolist()
    ends = torch.tensor([len(request.continuation) for request in requests]).cumsum(0).tolist()
    spans = [slice(end - len(request.continuation), end) for request, end in zip(requests, ends, strict=True)]
    return [Likelihood(tuple(logprobs[span]), all(likeliest[span])) for span in spans]


def states_of_whole(network: Transformer, requests: Sequence[Request]) -> list[Tensor]:
    """The hidden states (T, D) from which each request's continuation is foretold; every row is read from its start."""
    rows = [(*request.context, *request.continuation[:-1]) for request in requests]
    hidden = network.hidden_states(pad_right(rows, network.device)[0])
    starts = [len(request.context) - 1 for request in requests]
    return [hidden[row, start : len(rows[row])] for row, start in enumerate(starts)]


def states_of_shared(network: Transformer, requests: Sequence[Request]) -> list[Tensor]:
    """The same, with each context read once."""
    places: dict[tuple[int, ...], int] = {}
    for request in requests:
        places.setdefault(request.context, len(places))
    cache = KeyValueCache(network.config)
    tokens, mask = pad_left([list(context[:-1]) for context in places], network.device)
    network.hidden_states(tokens, mask, cache=cache)
    cache.advance()
    cache = cache.select(torch.tensor([places[request.context] for request in requests], device=network.device))
    rows = [(request.context[-1], *request.continuation[:-1]) for request in requests]
    hidden = network.hidden_states(pad_right(rows, network.device)[0], cache=cache)
    return [hidden[row, : len(rows[row])] for row in range(len(rows))]
