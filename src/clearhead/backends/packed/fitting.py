"""Find the scale and offset of each group of values with the smallest weighted error after rounding.

    grid = fit_offset(groups, weights, highest=15); quants = ((groups - grid.offsets) / grid.scales).round()

For each group of values, several scales are tried. With the quants that a scale gives, the best scale (and offset) is
the solution of a weighted least-squares problem, and the candidate with the smallest weighted error wins.

`fit_quickly` tries three candidates where `fit_offset` tries 17, for weights that are quantized while they are loaded.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_FINEST, _COARSEST, _NUM_CANDIDATES = -1.0, 1.0, 17  # steps by which candidates use fewer or more levels than there are

# Candidates of `fit_quickly`: the range of a group is divided into so many steps, and quants are shifted by so much.
# The first covers the whole range; the others are finer and leave out half a step at its upper or its lower end.
_QUICK_CANDIDATES = ((15.0, 0.0), (15.5, 0.0), (15.5, -0.5))


class Grid(NamedTuple):
    """Levels of groups: value = scale · quant + offset."""

    scales: Tensor  # (..., 1)
    offsets: Tensor  # (..., 1)


def _candidates(num_levels: int) -> Tensor:
    """Return factors of the number of levels that the range of a group is divided into."""
    return num_levels + torch.linspace(_FINEST, _COARSEST, _NUM_CANDIDATES)


def inverse(x: Tensor) -> Tensor:
    """Return 1 / x, and 0 for 0."""
    return torch.where(x == 0, 0.0, 1 / torch.where(x == 0, 1.0, x))


def fit_symmetric(x: Tensor, weights: Tensor, lowest: int, highest: int) -> Tensor:
    """Return the scale (..., 1) of each group (..., n) for quants from `lowest` to `highest`; it may be negative."""
    extreme = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    best_scale, best_gain = torch.zeros_like(extreme), torch.zeros_like(extreme)
    for levels in _candidates(-lowest):
        quants = (x * inverse(extreme) * -levels).round_().clamp_(lowest, highest)
        weighted = weights * quants
        products, squares = (weighted * x).sum(-1, keepdim=True), (weighted * quants).sum(-1, keepdim=True)
        scale = products * inverse(squares)
        gain = products * scale  # by how much this scale reduces the error of quants of zero
        better = gain > best_gain
        best_scale, best_gain = torch.where(better, scale, best_scale), torch.where(better, gain, best_gain)
    return best_scale


def fit_offset(x: Tensor, weights: Tensor, highest: int, *, below_zero: bool = False) -> Grid:
    """Return the scale and offset of each group for quants from 0 to `highest`; `below_zero`: offsets <= 0."""
    lowest = x.amin(-1, keepdim=True)
    lowest = lowest.clamp(max=0) if below_zero else lowest
    span = x.amax(-1, keepdim=True) - lowest
    total, total_x = weights.sum(-1, keepdim=True), (weights * x).sum(-1, keepdim=True)
    best = Grid(span / highest, lowest)
    best_error = torch.full_like(span, torch.inf)
    for levels in _candidates(highest):
        quants = ((x - lowest) * inverse(span) * levels).round_().clamp_(0, highest)
        weighted = weights * quants
        sum_q, sum_qq = weighted.sum(-1, keepdim=True), (weighted * quants).sum(-1, keepdim=True)
        sum_qx = (weighted * x).sum(-1, keepdim=True)
        determinant = total * sum_qq - sum_q * sum_q
        scales = (total * sum_qx - total_x * sum_q) * inverse(determinant)
        offsets = (sum_qq * total_x - sum_q * sum_qx) * inverse(determinant)
        if below_zero:
            scales = torch.where(offsets > 0, sum_qx * inverse(sum_qq), scales)
            offsets = offsets.clamp(max=0)
        error = (weights * (scales * quants + offsets - x).square()).sum(-1, keepdim=True)
        better = (error < best_error) & (determinant > 0) & (scales > 0)
        best = Grid(torch.where(better, scales, best.scales), torch.where(better, offsets, best.offsets))
        best_error = torch.where(better, error, best_error)
    return best


def fit_quickly(x: Tensor) -> Grid:
    """Return the scale and offset (..., 1) of each group (..., n) for quants from 0 to 15.

    The weight of an error is sqrt(mean square of the group + value²), as in gguf_quantizers.py. All values are first
    moved and scaled to 0 ... 1, so that float32 suffices for the sums. If scale and offset solve the least-squares
    problem, the error is Σ w y² - (scale · Σ w q y + offset · Σ w y); the candidate with the largest bracket wins.
    """
    lowest, highest = x.aminmax(dim=-1, keepdim=True)
    span = highest - lowest
    y = (x - lowest) * inverse(span)
    squares = x.square()
    weights = squares.add_(squares.mean(-1, keepdim=True)).sqrt_()
    weighted_y = weights * y
    total, sum_y = weights.sum(-1, keepdim=True), weighted_y.sum(-1, keepdim=True)
    best, best_gain = Grid(torch.zeros_like(span), torch.zeros_like(span)), torch.full_like(span, -torch.inf)
    products = torch.empty_like(y)
    for steps, shift in _QUICK_CANDIDATES:
        quants = (y * steps).add_(shift).round_().clamp_(0, 15)
        sum_qy = torch.mul(weighted_y, quants, out=products).sum(-1, keepdim=True)
        sum_q = torch.mul(weights, quants, out=products).sum(-1, keepdim=True)
        sum_qq = products.mul_(quants).sum(-1, keepdim=True)
        scales = (total * sum_qy - sum_y * sum_q) * inverse(total * sum_qq - sum_q * sum_q)
        offsets = (sum_y - scales * sum_q) * inverse(total)
        gain = scales * sum_qy + offsets * sum_y
        better = gain > best_gain
        best = Grid(torch.where(better, scales, best.scales), torch.where(better, offsets, best.offsets))
        best_gain = torch.where(better, gain, best_gain)
    return Grid(best.scales * span, best.offsets * span + lowest)
