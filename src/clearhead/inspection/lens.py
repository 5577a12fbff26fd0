"""The logit lens: every depth of the stream read as if it were the last (nostalgebraist 2020).

    for row in logit_lens(trace, top=3): print(row.layer, row.after, row.top_ids[-1])

A row is the stream after one branch. The rows of the last layer are always there: the last one is what the model says.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.heads import index
from clearhead.inspection.trace import Trace


@dataclass(frozen=True)
class LensRow:
    """The likeliest tokens at one depth; T is the rows asked for."""

    layer: int
    after: Literal["attention", "feed_forward"]
    top_ids: Tensor  # (T, top)
    top_probabilities: Tensor  # (T, top)
    entropy: Tensor  # (T,) nats


def logit_lens(trace: Trace, top: int = 5, every: int = 1, rows: Iterable[int] | None = None) -> list[LensRow]:
    """After both branches of every `every`-th layer, counted so that the last is among them; from bottom to top."""
    if not 1 <= top <= trace.config.vocab_size:
        raise ClearheadError(f"top is {top}; it must be from 1 to the vocabulary's {trace.config.vocab_size}")
    if every < 1:
        raise ClearheadError(f"every is {every}; it must be at least 1")
    length, last = len(trace.tokens), trace.num_layers - 1
    numbers = range(length) if rows is None else [index("row", row, length) for row in rows]
    places = torch.tensor(list(numbers), dtype=torch.long)
    found = []
    for layer in range(last % every, last + 1, every):
        found.append(lens_row(trace, layer, "attention", trace.middle(layer)[places], top))
        found.append(lens_row(trace, layer, "feed_forward", trace.residual(layer + 1)[places], top))
    return found


def lens_row(
    trace: Trace, layer: int, after: Literal["attention", "feed_forward"], states: Tensor, top: int
) -> LensRow:
    probabilities = trace.compute_logits(states).float().softmax(dim=-1)
    best = probabilities.topk(top, dim=-1)
    return LensRow(layer, after, best.indices, best.values, torch.special.entr(probabilities).sum(dim=-1))
