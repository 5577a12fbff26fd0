"""Compute the cross-entropy in float32, summed over the targets, for all tokens at once or in chunks.

    losses = cross_entropy(logits, targets); (losses.total / batch.num_targets).backward()

Losses are sums, not means. Divided by the number of targets of the whole step, over all parts and processes, k batches
of b rows give the same gradient as one batch of k·b rows, for any lengths.

    −Σ_t [(1 − ε) log p(y_t) + ε/V Σ_v log p(v)]  +  z Σ_t log²Z_t

ε is the label smoothing (Szegedy et al. 2016, §7). z is the weight of the z-loss, which keeps log Z, the logarithm of
the softmax's denominator, near 0 (de Brébisson & Vincent 2016; PaLM §5).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clearhead.data import IGNORED


class Losses(NamedTuple):
    """Sums over the targets."""

    total: Tensor  # to minimize
    cross_entropy: Tensor  # without smoothing and z-loss: to report


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, z_weight: float = 0.0) -> Losses:
    """Return the losses of logits (..., V) and targets (...). Positions with the target IGNORED do not count."""
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))  # (M, V)
    targets = targets.flatten()
    plain = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    total = plain
    if smoothing > 0.0:
        total = functional.cross_entropy(
            logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
        )
    if z_weight > 0.0:
        log_z = logits.logsumexp(dim=-1).masked_fill(targets == IGNORED, 0.0)
        total = total + z_weight * log_z.square().sum()
    return Losses(total, plain.detach())


def chunked_cross_entropy(
    hidden: Tensor,
    targets: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    chunk_tokens: int,
    smoothing: float = 0.0,
    z_weight: float = 0.0,
) -> Losses:
    """Return the losses from hidden states (B, T, D), with the logits of one chunk in memory at a time.

    The backward pass computes the logits of each chunk again.
    """

    def chunk_losses(states: Tensor, targets: Tensor) -> Losses:
        return cross_entropy(compute_logits(states), targets, smoothing, z_weight)

    states, targets = hidden.flatten(0, 1), targets.flatten()
    total = plain = torch.zeros((), device=hidden.device)
    for start in range(0, len(targets), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        chunk_total, chunk_plain = checkpoint(chunk_losses, states[None, chunk], targets[chunk], use_reentrant=False)
        total, plain = total + chunk_total, plain + chunk_plain
    return Losses(total, plain)
