"""Round the matrices of a layer to 8 bits, to embed them in a page.

    rounded = round_matrices(view.matrices(0, None), heads=[0, 3]); rounded.weights   # (2, number of allowed cells)

A weight is stored where the mask allows it, as the square root of its ratio to the largest weight of its row, because
colors follow it too. Its error is at most 0.4 % of that largest weight. A score is stored on a linear scale
between the smallest and the largest score of its head, with an error of at most 0.2 % of that range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.views import AttentionMatrices

MAX_LEVEL = 254  # weights and finite scores have the levels 0 to 254
NOT_FINITE = 255  # the level of NaN and of infinite numbers
MAX_MAXIMUM = 65535  # the level of a row maximum of 1


@dataclass(frozen=True)
class RoundedMatrices:
    """The matrices of n heads as levels of 8 bits, with the numbers that scale them."""

    weights: Tensor  # (n, number of allowed cells), uint8
    maxima: Tensor  # (n, T), uint16: the largest weight of each row, from 0 to 1
    scores: Tensor | None  # (n, T, S), uint8
    ranges: Tensor | None  # (n, 2), float32: the smallest and the largest score of each head


def round_matrices(matrices: AttentionMatrices, heads: Sequence[int]) -> RoundedMatrices:
    """Return the matrices of some heads, rounded."""
    allowed = torch.ones(matrices.weights.shape[1:], dtype=torch.bool) if matrices.allowed is None else matrices.allowed
    allowed = allowed.cpu()
    rounded = [_round_weights(matrices.weights[head].detach().double().cpu(), allowed) for head in heads]
    weights, maxima = (torch.stack(parts) for parts in zip(*rounded, strict=True))
    if matrices.scores is None:
        return RoundedMatrices(weights, maxima, None, None)
    scores = [_round_scores(matrices.scores[head].detach().double().cpu()) for head in heads]
    levels, ranges = (torch.stack(parts) for parts in zip(*scores, strict=True))
    return RoundedMatrices(weights, maxima, levels, ranges)


def _round_weights(weights: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels of the allowed cells, and those of the row maxima."""
    finite = weights.nan_to_num(0.0, 0.0, 0.0)
    maxima = (finite.amax(dim=1).clamp(max=1.0) * MAX_MAXIMUM).ceil()  # up, so that no weight is above its maximum
    scale = (maxima / MAX_MAXIMUM).clamp(min=1 / MAX_MAXIMUM)[:, None]
    levels = ((finite / scale).clamp(min=0.0, max=1.0).sqrt() * MAX_LEVEL).round()
    levels = levels.masked_fill(~weights.isfinite(), NOT_FINITE)
    return levels[allowed].to(torch.uint8), maxima.to(torch.uint16)


def _round_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the levels of all cells, and the smallest and the largest finite score."""
    is_finite = scores.isfinite()
    finite = scores[is_finite]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    levels = ((scores.nan_to_num(low, low, low) - low) / ((high - low) or 1.0) * MAX_LEVEL).round()
    return levels.masked_fill(~is_finite, NOT_FINITE).to(torch.uint8), torch.tensor([low, high])
