"""Attention matrices to display: one view for each kind of attention, with the texts of its queries and keys.

for view in trace.attention_views(): print(view.title, view.matrices(0, None).weights.shape)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.inspection.attention_heads import AttentionHeads, select_heads


@dataclass(frozen=True)
class AttentionMatrices:
    """The steps of attention of the requested heads of one layer."""

    weights: Tensor  # (N, T, S)
    scores: Tensor | None = None  # (N, T, S), before the mask
    allowed: Tensor | None = None  # (T, S); None: nothing is masked


@dataclass(frozen=True)
class AttentionView:
    """One kind of attention, with the token texts of its queries and keys."""

    title: str
    rows: Sequence[str]  # texts of the queries
    columns: Sequence[str]  # texts of the keys
    num_heads: Sequence[int]  # of each layer
    matrices: Callable[[int, int | None], AttentionMatrices]  # of a layer, and one head of it or all (None)


@torch.no_grad()
def compute_matrices(heads: AttentionHeads, head: int | None) -> AttentionMatrices:
    """Return the matrices of one head, or of all heads, of a layer."""
    steps = select_heads(heads, head, None).compute()
    return AttentionMatrices(steps.weights[0], steps.scores[0], heads.allowed(torch.arange(heads.queries.shape[2])))


def alignment_view(alignments: Tensor, targets: Sequence[str], sources: Sequence[str]) -> AttentionView:
    """Return the view of a recurrent model's alignments (T, S): one head in one layer."""
    return AttentionView("alignment", targets, sources, [1], lambda layer, head: AttentionMatrices(alignments[None]))
