"""The options of a batch's sequences side by side, as tensors on its device.

    rows = SamplingParameters.of([SamplingOptions(top_k=40), SamplingOptions(temperature=0.7, seed=1)], vocab_size)

Made when the batch changes, not at every step. A setting is a column (B, 1). A row that does not ask for it has the
value that changes nothing there; if no row asks, the column is None and its filter is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.options import SamplingOptions


@dataclass(frozen=True)
class Entries:
    """A value for each of n places in a (B, V) tensor."""

    rows: Tensor  # (n,)
    tokens: Tensor  # (n,)
    values: Tensor  # (n,)


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    seeds: Tensor  # (B,)
    greedy: Tensor  # (B,) bool
    all_greedy: bool
    bias: Entries | None
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None
    early_stops: Entries | None  # stop tokens, each with the step from which it is allowed
    temperature: Tensor | None
    top_k: Tensor | None  # 0: every token
    largest_top_k: int
    tail: Tensor | None  # 1 - top_p: the probability that may be cut off
    min_p: Tensor | None

    @staticmethod
    def of(
        options: Sequence[SamplingOptions], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingParameters":
        """One row for each; a sampled row needs a seed (`SamplingOptions.seeded`)."""
        for row in options:
            check_vocabulary(row, vocab_size)
            assert row.is_greedy or row.seed is not None, "seed the options before making a batch of them"
        biases = [(row, *pair) for row, option in enumerate(options) for pair in dict(option.logit_bias).items()]
        stops = [(row, token, option.min_new_tokens) for row, option in enumerate(options) for token in option.stop_ids]
        top_k = [row.top_k if row.top_k is not None and row.top_k < vocab_size else 0 for row in options]
        tail = [-1.0 if row.top_p in (None, 1) else 1 - row.top_p for row in options]
        return SamplingParameters(
            seeds=torch.tensor([row.seed or 0 for row in options], device=device),
            greedy=torch.tensor([row.is_greedy for row in options], device=device),
            all_greedy=all(row.is_greedy for row in options),
            bias=entries(biases, device),
            repetition=column([row.repetition_penalty for row in options], 1.0, device),
            presence=column([row.presence_penalty for row in options], 0.0, device),
            frequency=column([row.frequency_penalty for row in options], 0.0, device),
            early_stops=entries([stop for stop in stops if stop[2] > 0], device),
            temperature=column([row.temperature or 1.0 for row in options], 1.0, device),
            top_k=column(top_k, 0, device),
            largest_top_k=max(top_k),
            tail=column(tail, -1.0, device),
            min_p=column([row.min_p or 0.0 for row in options], 0.0, device),
        )

    @property
    def needs_counts(self) -> bool:
        return any(setting is not None for setting in (self.repetition, self.presence, self.frequency))


def column(values: Sequence[float], off: float, device: torch.device | str) -> Tensor | None:
    """(B, 1), whole numbers as int64 and others as float32; None if all are off."""
    if all(value == off for value in values):
        return None
    return torch.tensor(values, dtype=torch.int64 if isinstance(off, int) else torch.float32, device=device)[:, None]


def entries(places: Sequence[tuple[int, int, float]], device: torch.device | str) -> Entries | None:
    """From (row, token, value); None if there are none."""
    if not places:
        return None
    rows, tokens, values = zip(*places, strict=True)
    floats = torch.tensor(values, dtype=torch.float32, device=device)
    return Entries(torch.tensor(rows, device=device), torch.tensor(tokens, device=device), floats)


def check_vocabulary(options: SamplingOptions, vocab_size: int) -> None:
    for name, ids in (("logit_bias", dict(options.logit_bias)), ("stop_ids", options.stop_ids)):
        for token in ids:
            if token >= vocab_size:
                raise ClearheadError(f"{name} names token {token}; the vocabulary has the ids 0 to {vocab_size - 1}")
