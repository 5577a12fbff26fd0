"""Measure how much of a head's attention follows trivial patterns, and how much goes to specific tokens.

    shares = attention_shares(weights, allowed, is_self_attention=True); shares.specific   # (N,), between 0 and 1

Most heads give most of their weight to the first token, to the token itself, to a neighbor, evenly to all tokens, or to
a few common tokens that attract every query. The specific share is what remains. It is large for heads that look for
something, such as the verb of an object, or what followed the same word before.

Each row of weights is split in this order: the cells of `_trivial_patterns`; from every other cell, at most the mean of
these other cells of the row (the even spread); from what is left, at most the mean of what is left in the same column
for the other queries (the common tokens).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionShares:
    """Where the attention of each head goes: shares that sum to 1, averaged over the queries that have a choice."""

    patterns: dict[str, Tensor]  # by name of the pattern: (N,)
    strongest_cells: list[tuple[int, int]]  # of each head: the query and the key with the largest specific weight

    @property
    def specific(self) -> Tensor:
        """The share of each head that follows no trivial pattern (N,)."""
        return self.patterns["specific"]


def attention_shares(weights: Tensor, allowed: Tensor | None, is_self_attention: bool) -> AttentionShares | None:
    """Return the shares of each head, or None if no query can choose between two tokens outside the patterns.

    weights: (N, T, S). allowed: the mask (T, S); None allows every cell.
    """
    num_queries, num_keys = weights.shape[1:]
    others = torch.ones(num_queries, num_keys, dtype=torch.bool) if allowed is None else allowed.cpu().clone()
    cells = {}
    for name, pattern in _trivial_patterns(num_queries, num_keys, is_self_attention).items():
        cells[name] = pattern & others
        others &= ~pattern
    has_choice = others.sum(dim=1) >= 2
    if not has_choice.any():
        return None
    cells = {name: pattern for name, pattern in cells.items() if pattern[has_choice].any()}
    shares: dict[str, list[Tensor]] = {name: [] for name in (*cells, "even spread", "common tokens", "specific")}
    strongest = []
    for head in weights:  # one head at a time: the temporary matrices of a long text are large
        head = head.detach().double().cpu().nan_to_num(0.0)
        parts = {name: head * pattern for name, pattern in cells.items()} | _split_others(head * others, others)
        for name, part in parts.items():
            shares[name].append(part[has_choice].sum(dim=1).mean())
        strongest.append(divmod(int(parts["specific"].argmax()), num_keys))
    return AttentionShares({name: torch.stack(values) for name, values in shares.items()}, strongest)


def _split_others(weights: Tensor, others: Tensor) -> dict[str, Tensor]:
    """Split weights (T, S), which are 0 outside the cells `others`, into three parts with this sum."""
    row_mean = weights.sum(dim=1, keepdim=True) / others.sum(dim=1, keepdim=True).clamp(min=1)
    uneven = (weights - row_mean).clamp(min=0)
    num_other_queries = others.sum(dim=0, keepdim=True) - 1
    column_mean = (uneven.sum(dim=0, keepdim=True) - uneven) / num_other_queries.clamp(min=1)
    specific = (uneven - column_mean).clamp(min=0)
    return {"even spread": weights - uneven, "common tokens": uneven - specific, "specific": specific}


def _trivial_patterns(num_queries: int, num_keys: int, is_self_attention: bool) -> dict[str, Tensor]:
    """Return the cells (T, S) of each pattern; where two patterns overlap, the earlier one counts."""
    queries, keys = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None]
    patterns = {"first token": (keys == 0).expand(num_queries, -1)}
    if is_self_attention:
        patterns |= {
            "itself": keys == queries,
            "previous token": keys == queries - 1,
            "next token": keys == queries + 1,
        }
    return patterns | {"last token": (keys == num_keys - 1).expand(num_queries, -1)}
