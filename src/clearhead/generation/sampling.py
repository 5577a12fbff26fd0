"""From logits to the next token of each row; every row has its own options and never feels its neighbours.

    rows = SamplingParameters.of([SamplingOptions(temperature=0.8, top_p=0.9).seeded()], vocab_size)
    tokens = next_tokens(logits, rows, steps)    # (B, V), (B,) -> (B,)

The order is that of transformers' LogitsProcessors, with OpenAI's two penalties after the one for repetition:

    bias -> penalties -> min_new_tokens -> argmax                                           if greedy
                                        -> temperature -> top_k -> top_p -> min_p -> draw   otherwise

`next_tokens` is pure and runs on the device alone: nothing waits for a number to come back to the host. Only Apple's
GPUs have no float64, in which tokens are drawn and probabilities summed: for those the processor chooses.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.generation.penalties import TokenCounts, penalize_frequency, penalize_presence, penalize_repetition
from clearhead.generation.randomness import draw
from clearhead.generation.sampling_parameters import Entries, SamplingParameters


def next_tokens(logits: Tensor, rows: SamplingParameters, steps: Tensor, counts: TokenCounts | None = None) -> Tensor:
    """(B, V) -> (B,). `steps` (B,): tokens each row has generated; `counts`: where `rows.needs_counts`."""
    logits = adjust(logits.float(), rows, steps, counts)
    likeliest = logits.argmax(dim=-1)
    if rows.all_greedy:
        return likeliest
    return torch.where(rows.greedy, likeliest, draw(truncate(logits, rows), rows.seeds, steps))


def choosing_device(device: torch.device) -> torch.device:
    """Where the logits of a network on `device` become tokens."""
    return torch.device("cpu") if device.type == "mps" else device


def check_numbers(logits: Tensor, tokens: Tensor) -> None:
    """That the network gave any: a NaN or infinity is taken for the largest, so it was chosen; (B, V), (B,)."""
    if not math.isfinite(logits.gather(1, tokens[:, None]).sum()):
        raise ClearheadError(
            "the network's logits are not numbers: its weights are damaged, or its dtype is too narrow for them; "
            "float32 is wide enough"
        )


# --- what may change the likeliest token


def adjust(logits: Tensor, rows: SamplingParameters, steps: Tensor, counts: TokenCounts | None = None) -> Tensor:
    """Bias, penalties, and no stop token before its time; (B, V) -> (B, V)."""
    if rows.bias is not None:
        logits = add_entries(logits, rows.bias)
    if rows.needs_counts:
        assert counts is not None, "a row asks for penalties: give the counts of its tokens"
        logits = penalize(logits, rows, counts)
    if rows.early_stops is not None:
        logits = forbid_early_stops(logits, rows.early_stops, steps)
    return logits


def add_entries(logits: Tensor, bias: Entries) -> Tensor:
    return logits.index_put((bias.rows, bias.tokens), bias.values, accumulate=True)


def penalize(logits: Tensor, rows: SamplingParameters, counts: TokenCounts) -> Tensor:
    if rows.repetition is not None:
        logits = penalize_repetition(logits, counts.seen, rows.repetition)
    if rows.frequency is not None:
        logits = penalize_frequency(logits, counts.output, rows.frequency)
    if rows.presence is not None:
        logits = penalize_presence(logits, counts.output, rows.presence)
    return logits


def forbid_early_stops(logits: Tensor, stops: Entries, steps: Tensor) -> Tensor:
    """The logit of a stop token is -inf until its row has generated as many tokens as the entry's value."""
    early = steps[stops.rows] < stops.values
    return add_entries(logits, Entries(stops.rows, stops.tokens, torch.where(early, -math.inf, 0.0)))


# --- what thins out the rest; a token cut off has the logit -inf


def truncate(logits: Tensor, rows: SamplingParameters) -> Tensor:
    """Temperature, then the three filters; (B, V) -> (B, V)."""
    if rows.temperature is not None:
        logits = logits / rows.temperature
    if rows.top_k is not None:
        logits = keep_top_k(logits, rows.top_k, rows.largest_top_k)
    if rows.tail is not None:
        logits = cut_tail(logits, rows.tail)
    if rows.min_p is not None:
        logits = keep_min_p(logits, rows.min_p)
    return logits


def keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """The `top_k` (B, 1) likeliest and all that equal the last of them; `largest` bounds top_k, 0 keeps every token."""
    candidates = logits.topk(largest, dim=-1).values
    threshold = candidates.gather(1, (top_k - 1).clamp(min=0))
    return logits.masked_fill((logits < threshold) & (top_k > 0), -math.inf)


def cut_tail(logits: Tensor, tail: Tensor) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020): the least likely go while their sum is at most `tail` (B, 1).

    One token always stays, and of equal ones the lower ids, as with argmax.
    """
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    # In float64 the sum is right far beyond float32's last digit, so that the order of summation, which differs
    # between CUDA's kernels for one row and for several, does not show.
    cumulative = descending.flip(-1).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).float()
    cut = (cumulative <= tail).flip(-1)
    cut[:, 0] = False
    return logits.masked_fill(cut.scatter(1, order, cut), -math.inf)


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Those at least `min_p` (B, 1) times as likely as the likeliest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -math.inf)


# --- log-probabilities


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms under softmax(logits) as the network gave them: no temperature, penalty or filter."""

    chosen: Tensor  # (...,)
    top: Tensor  # (..., n), the largest first
    top_ids: Tensor  # (..., n)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int = 0) -> TokenLogprobs:
    """Of the given tokens and of the `num_top` likeliest; (..., V), (...,)."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return TokenLogprobs(logprobs.gather(-1, tokens[..., None])[..., 0], top.values, top.indices)
