"""Rank the heads of a trace by the specific share of their attention, to show the most interesting ones first.

ranking = rank_heads(views, measure_shares(views)); ranking[0]   # RankedHead(view=0, layer=10, head=1, ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.inspection.shares import AttentionShares, attention_shares
from clearhead.inspection.views import AttentionView


@dataclass(frozen=True)
class HeadSelection:
    """The layer and head to show; None leaves the choice open."""

    layer: int | None = None
    head: int | None = None

    def priority(self, layer: int, head: int) -> tuple[bool, bool]:
        """Return a sort key that puts the selected layer first, and the selected head first within a layer."""
        return self.layer not in (None, layer), self.head not in (None, head)


NO_SELECTION = HeadSelection()


@dataclass(frozen=True)
class RankedHead:
    """A head, the specific share of its attention, and the cell that contributes most to it."""

    view: int
    layer: int
    head: int
    specific: float | None  # None: the text is too short to tell
    row: int
    column: int


def measure_shares(views: Sequence[AttentionView]) -> list[list[AttentionShares | None]]:
    """Return the attention shares of every layer of every view."""
    shares: list[list[AttentionShares | None]] = []
    for view in views:
        is_self_attention = view.rows == view.columns
        layers = (view.matrices(layer, None) for layer in range(len(view.num_heads)))
        shares.append([attention_shares(layer.weights, layer.allowed, is_self_attention) for layer in layers])
    return shares


def rank_heads(
    views: Sequence[AttentionView],
    shares: Sequence[Sequence[AttentionShares | None]],
    selection: HeadSelection = NO_SELECTION,
) -> list[RankedHead]:
    """Return all heads: first those of the selection, and among these the largest specific share first."""
    heads = [
        _describe_head(number, layer, head, len(view.rows), shares[number][layer])
        for number, view in enumerate(views)
        for layer, count in enumerate(view.num_heads)
        for head in range(count)
    ]
    return sorted(heads, key=lambda one: (selection.priority(one.layer, one.head), -(one.specific or 0.0)))


def _describe_head(view: int, layer: int, head: int, num_rows: int, shares: AttentionShares | None) -> RankedHead:
    """Return the rank entry of one head; without shares, its cell is the first of the last row."""
    if shares is None:
        return RankedHead(view, layer, head, None, num_rows - 1, 0)
    return RankedHead(view, layer, head, float(shares.specific[head]), *shares.strongest_cells[head])
