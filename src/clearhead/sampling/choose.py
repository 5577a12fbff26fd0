"""Turn logits into the next token of each sequence. Each has its own options and is independent of its batch.

    parameters = SamplingParameters.from_options([SamplingOptions(temperature=0.8, seed=1)], vocab_size)
    tokens = next_tokens(logits, parameters, steps)    # (B, V), (B,) -> (B,)

The order is that of transformers' LogitsProcessors, with OpenAI's two penalties after the repetition penalty:

    bias -> penalties -> min_new_tokens -> allowed -> argmax                                           if greedy
                                                   -> temperature -> top_k -> top_p -> min_p -> draw   otherwise

`next_tokens` is pure and never waits for the device. Tokens are drawn and probabilities are summed in float64. Apple's
GPUs do not have float64, so for them tokens are chosen on the CPU.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.sampling.parameters import SamplingParameters, SparseValues
from clearhead.sampling.penalties import TokenCounts, penalize_frequency, penalize_presence, penalize_repetition
from clearhead.sampling.randomness import draw_tokens


def next_tokens(
    logits: Tensor,
    parameters: SamplingParameters,
    steps: Tensor,
    counts: TokenCounts | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return the next tokens: (B, V) -> (B,).

    steps (B,): the number of tokens each sequence has generated. counts: required if `parameters.needs_counts`.
    allowed (B, V): False rules a token out; None allows all.
    """
    logits = adjust_logits(logits.float(), parameters, steps, counts)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    most_likely = _argmax(logits)
    if parameters.all_greedy:
        return most_likely
    drawn = draw_tokens(filter_logits(logits, parameters), parameters.seeds, steps)
    return torch.where(parameters.greedy, most_likely, drawn)


def _argmax(logits: Tensor) -> Tensor:
    """Return the index of the largest value of each row; of NaN, or of several equal ones, the first: (B, V) -> (B,).

    On a CPU, numpy finds it in a tenth of the time of torch, which does not vectorize this search.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))


def sampling_device(device: torch.device) -> torch.device:
    """Return the device on which the logits of a network on `device` become tokens."""
    return torch.device("cpu") if device.type == "mps" else device


def check_finite(logits: Tensor, tokens: Tensor) -> None:
    """Raise ClearheadError if logits (B, V) are NaN or infinite at the chosen tokens (B,).

    argmax treats NaN and infinity as the largest values, so checking the chosen tokens finds any of them.
    """
    if not math.isfinite(logits.gather(1, tokens[:, None]).sum()):
        raise ClearheadError(
            "the network's logits are not finite, because its weights are damaged or its dtype is too narrow for them; "
            "load the model in float32"
        )


# --- adjustments, which may change the most likely token


def adjust_logits(
    logits: Tensor, parameters: SamplingParameters, steps: Tensor, counts: TokenCounts | None = None
) -> Tensor:
    """Apply bias and penalties, and rule out stop tokens before min_new_tokens; (B, V) -> (B, V)."""
    if parameters.bias is not None:
        logits = _add_sparse(logits, parameters.bias)
    if parameters.needs_counts:
        assert counts is not None, "a sequence has a penalty: give the counts of its tokens"
        logits = _apply_penalties(logits, parameters, counts)
    if parameters.early_stops is not None:
        logits = _forbid_early_stops(logits, parameters.early_stops, steps)
    return logits


def _add_sparse(logits: Tensor, values: SparseValues) -> Tensor:
    return logits.index_put((values.rows, values.tokens), values.values, accumulate=True)


def _apply_penalties(logits: Tensor, parameters: SamplingParameters, counts: TokenCounts) -> Tensor:
    if parameters.repetition is not None:
        logits = penalize_repetition(logits, counts.seen, parameters.repetition)
    if parameters.frequency is not None:
        logits = penalize_frequency(logits, counts.output, parameters.frequency)
    if parameters.presence is not None:
        logits = penalize_presence(logits, counts.output, parameters.presence)
    return logits


def _forbid_early_stops(logits: Tensor, stops: SparseValues, steps: Tensor) -> Tensor:
    """Set the logit of a stop token to -inf until its sequence has generated as many tokens as the stop's value."""
    early = steps[stops.rows] < stops.values
    return _add_sparse(logits, SparseValues(stops.rows, stops.tokens, torch.where(early, -math.inf, 0.0)))


# --- filters, which set the logits of removed tokens to -inf


def filter_logits(logits: Tensor, parameters: SamplingParameters) -> Tensor:
    """Apply the temperature, then top_k, top_p and min_p; (B, V) -> (B, V)."""
    if parameters.temperature is not None:
        logits = logits / parameters.temperature
    if parameters.top_k is not None:
        logits = _keep_top_k(logits, parameters.top_k, parameters.largest_top_k)
    if parameters.tail is not None:
        logits = _cut_tail(logits, parameters.tail)
    if parameters.min_p is not None:
        logits = _keep_min_p(logits, parameters.min_p)
    return logits


def _keep_top_k(logits: Tensor, top_k: Tensor, largest: int) -> Tensor:
    """Keep the `top_k` (B, 1) most likely tokens and those as likely as the last of them.

    0 keeps every token; `largest` is the largest top_k.
    """
    candidates = logits.topk(largest, dim=-1).values
    threshold = candidates.gather(1, (top_k - 1).clamp(min=0))
    return logits.masked_fill((logits < threshold) & (top_k > 0), -math.inf)


def _cut_tail(logits: Tensor, tail: Tensor) -> Tensor:
    """Remove the least likely tokens as long as their total is at most `tail` (B, 1), which is 1 - top_p.

    This is nucleus sampling (Holtzman et al. 2020). One token always stays. Of equally likely tokens those with lower
    ids stay, as with argmax.
    """
    if logits.device.type == "cpu":
        rows = zip(logits, logits.softmax(dim=-1), tail[:, 0].tolist(), strict=True)
        return torch.stack([_cut_tail_of_row(*row) for row in rows])
    descending, order = logits.sort(dim=-1, descending=True, stable=True)
    # CUDA sums one row and several rows in different orders. In float64 the difference is far below float32's
    # last digit, so it does not change the result.
    cumulative = descending.flip(-1).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64).float()
    cut = (cumulative <= tail).flip(-1)
    cut[:, 0] = False
    return logits.masked_fill(cut.scatter(1, order, cut), -math.inf)


def _cut_tail_of_row(logits: Tensor, probabilities: Tensor, tail: float) -> Tensor:
    """Cut the tail of the probabilities of one row (V,), and sort only its likely tokens for that.

    Tokens less likely than tail / V are cut for certain: they are the least likely ones, and their total is below tail.
    """
    likely = probabilities >= tail / len(logits) * 0.99  # rounding must not make one of them unlikely
    candidates = torch.from_numpy(np.flatnonzero(likely.numpy()))
    if tail < 0 or len(candidates) == 0:  # top_p is not used, or the logits are NaN
        return logits
    values, order = logits[candidates].sort(descending=True, stable=True)
    candidates = candidates[order]
    unlikely = probabilities.double().masked_fill(likely, 0).sum()
    cumulative = (unlikely + probabilities[candidates].flip(0).cumsum(0, dtype=torch.float64)).float().flip(0)
    keep = cumulative > tail
    keep[0] = True
    return torch.full_like(logits, -math.inf).index_put((candidates[keep],), values[keep])


def _keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Keep tokens at least `min_p` (B, 1) times as likely as the most likely one (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -math.inf)


# --- log-probabilities


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of softmax(logits) of the network itself, without temperature, penalties or filters."""

    chosen: Tensor  # (...,)
    top: Tensor  # (..., n), the largest first
    top_ids: Tensor  # (..., n)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int = 0) -> TokenLogprobs:
    """Return the log-probabilities of the given tokens and of the `num_top` most likely ones; (..., V), (...,)."""
    logprobs = logits.float().log_softmax(dim=-1)
    top = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    return TokenLogprobs(logprobs.gather(-1, tokens[..., None])[..., 0], top.values, top.indices)
