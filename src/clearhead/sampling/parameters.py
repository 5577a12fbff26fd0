"""The sampling options of a batch as tensors on its device.

    options = [SamplingOptions(top_k=40), SamplingOptions(temperature=0.7, seed=1)]
    parameters = SamplingParameters.from_options(options, vocab_size)

They are created when the batch changes, not for every step. An option is a column (B, 1); a sequence that does not use
it has the value that changes nothing. If no sequence uses it, the column is None and its filter is skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.options import SamplingOptions


@dataclass(frozen=True)
class SparseValues:
    """Values at n places of a (B, V) tensor."""

    rows: Tensor  # (n,)
    tokens: Tensor  # (n,)
    values: Tensor  # (n,)


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """The options of every sequence of a batch, side by side."""

    seeds: Tensor  # (B,)
    greedy: Tensor  # (B,) bool
    all_greedy: bool
    bias: SparseValues | None
    repetition: Tensor | None
    presence: Tensor | None
    frequency: Tensor | None
    early_stops: SparseValues | None  # stop tokens; the value is the step from which one is allowed
    temperature: Tensor | None
    top_k: Tensor | None  # 0 keeps every token
    largest_top_k: int
    tail: Tensor | None  # 1 - top_p: the probability that may be cut off
    min_p: Tensor | None

    @staticmethod
    def from_options(
        options: Sequence[SamplingOptions], vocab_size: int, device: torch.device | str = "cpu"
    ) -> "SamplingParameters":
        """Collect the options of a batch. Those that sample need a seed (`SamplingOptions.with_seed`)."""
        assert all(each.is_greedy or each.seed is not None for each in options), "call with_seed on the options first"
        biases = [(row, *pair) for row, each in enumerate(options) for pair in dict(each.logit_bias).items()]
        stops = [(row, token, each.min_new_tokens) for row, each in enumerate(options) for token in each.stop_ids]
        top_k = [each.top_k if each.top_k is not None and each.top_k < vocab_size else 0 for each in options]
        tail = [-1.0 if each.top_p in (None, 1) else 1 - each.top_p for each in options]
        return SamplingParameters(
            seeds=torch.tensor([each.seed or 0 for each in options], device=device),
            greedy=torch.tensor([each.is_greedy for each in options], device=device),
            all_greedy=all(each.is_greedy for each in options),
            bias=_sparse_values(biases, device),
            repetition=column([each.repetition_penalty for each in options], 1.0, device),
            presence=column([each.presence_penalty for each in options], 0.0, device),
            frequency=column([each.frequency_penalty for each in options], 0.0, device),
            early_stops=_sparse_values([stop for stop in stops if stop[2] > 0], device),
            temperature=column([each.temperature or 1.0 for each in options], 1.0, device),
            top_k=column(top_k, 0, device),
            largest_top_k=max(top_k),
            tail=column(tail, -1.0, device),
            min_p=column([each.min_p or 0.0 for each in options], 0.0, device),
        )

    @property
    def needs_counts(self) -> bool:
        """Whether a penalty needs the counts of the tokens so far."""
        return any(penalty is not None for penalty in (self.repetition, self.presence, self.frequency))


def column(values: Sequence[float], off: float, device: torch.device | str) -> Tensor | None:
    """Return the values as (B, 1), int64 if `off` is an int and else float32; None if all equal `off`."""
    if all(value == off for value in values):
        return None
    return torch.tensor(values, dtype=torch.int64 if isinstance(off, int) else torch.float32, device=device)[:, None]


def _sparse_values(entries: Sequence[tuple[int, int, float]], device: torch.device | str) -> SparseValues | None:
    """Convert (row, token, value) entries; return None if there are none."""
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    floats = torch.tensor(values, dtype=torch.float32, device=device)
    return SparseValues(torch.tensor(rows, device=device), torch.tensor(tokens, device=device), floats)
