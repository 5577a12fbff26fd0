"""Cross-entropy in float32, summed over the tokens that are asked for; whole or in chunks of tokens.

    losses = cross_entropy(logits, targets); (losses.total / batch.num_targets).backward()

Sums, not means: divided by the number of targets of the whole update, over all accumulation steps and ranks, k batches
of b rows weigh as one of k·b, whatever their lengths.

    −Σ_t [(1 − ε) log p(y_t) + ε/V Σ_v log p(v)]  +  z Σ_t log²Z_t

with ε the label smoothing (Szegedy et al. 2016, §7) and z the weight that keeps log Z, the logarithm of the softmax's
denominator, near 0 (de Brébisson & Vincent 2016; PaLM §5).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clearhead.data import IGNORED


class Losses(NamedTuple):
    """Sums over the tokens asked for."""

    total: Tensor  # what is minimized
    cross_entropy: Tensor  # of the plain targets, without smoothing and z: what is reported


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, z_weight: float = 0.0) -> Losses:
    """logits (..., V), targets (...) with IGNORED where nothing is asked."""
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
    to_logits: Callable[[Tensor], Tensor],
    chunk_tokens: int,
    smoothing: float = 0.0,
    z_weight: float = 0.0,
) -> Losses:
    """The same from hidden states (B, T, D): logits exist for one chunk at a time, and again when it goes backward."""

    def of_chunk(states: Tensor, asked: Tensor) -> Losses:
        return cross_entropy(to_logits(states), asked, smoothing, z_weight)

    states, asked = hidden.flatten(0, 1), targets.flatten()
    total = plain = torch.zeros((), device=hidden.device)
    for start in range(0, len(asked), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        chunk_total, chunk_plain = checkpoint(of_chunk, states[None, part], asked[part], use_reentrant=False)
        total, plain = total + chunk_total, plain + chunk_plain
    return Losses(total, plain)
