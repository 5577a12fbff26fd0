"""The queries, keys and values of one attention layer, and the scores and weights computed from them.

    weights = heads.select(head=3, rows=torch.arange(8)).compute().weights   # (1, 1, 8, S)

Only the scores grow with the square of the number of tokens, so they are computed for the requested heads and rows
only.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.model import AttentionContext, AttentionSteps, Mask, Scoring, attention_steps

MAX_SCORES = 2**29  # scores computed for one request: 2 GiB in float32


@dataclass(frozen=True)
class AttentionHeads:
    """What one attention layer passes to its kernel for a single sequence."""

    queries: Tensor  # (1, N, T, H)
    keys: Tensor  # (1, K, S, H)
    values: Tensor  # (1, K, S, H of values)
    scoring: Scoring

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.queries.shape[1]

    def key_value_head(self, head: int) -> int:
        """Return the index of the key-value head that a query head uses."""
        return head // (self.num_heads // self.keys.shape[1])

    def select(self, head: int | None, rows: Tensor) -> "AttentionHeads":
        """Return one head, or all if `head` is None, with only the queries at the positions `rows` (n,)."""
        scoring = replace(
            self.scoring,
            mask=Mask(self.allowed(rows)[None, None]),
            temperature=_select_optional(self.scoring.temperature, 2, rows),
            bias=_select_optional(self.scoring.bias, 2, rows),
        )
        all_heads = AttentionHeads(self.queries[:, :, rows], self.keys, self.values, scoring)
        if head is None:
            return all_heads
        query_head, key_value_head = torch.tensor([head]), torch.tensor([self.key_value_head(head)])
        return AttentionHeads(
            _select_along(all_heads.queries, 1, query_head),
            _select_along(all_heads.keys, 1, key_value_head),
            _select_along(all_heads.values, 1, key_value_head),
            replace(
                scoring,
                bias=_select_optional(scoring.bias, 1, query_head),
                sinks=None if scoring.sinks is None else scoring.sinks[head : head + 1],
            ),
        )

    def allowed(self, rows: Tensor) -> Tensor:
        """Return which keys the queries at the positions `rows` may attend to (n, S)."""
        num_keys, device = self.keys.shape[-2], self.keys.device
        if self.scoring.mask.causal:
            return torch.arange(num_keys, device=device) <= rows.to(device)[:, None]
        all_keys = torch.ones(len(rows), num_keys, dtype=torch.bool, device=device)
        allowed = _select_optional(self.scoring.mask.allowed, 2, rows)
        return all_keys if allowed is None else all_keys & allowed[0, 0]

    def compute(self) -> AttentionSteps:
        """Return the scores, weights and output of these heads."""
        return attention_steps(self.queries, self.keys, self.values, self.scoring)


def _select_optional(tensor: Tensor | None, dim: int, indices: Tensor) -> Tensor | None:
    """Select as `_select_along` does; None stays None."""
    return None if tensor is None else _select_along(tensor, dim, indices)


def _select_along(tensor: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return the entries `indices` along `dim`, or the tensor unchanged if that dimension is broadcast (size 1)."""
    return tensor if tensor.shape[dim] == 1 else tensor.index_select(dim, indices.to(tensor.device))


def capture_heads(
    attention: nn.Module, x: Tensor, context: AttentionContext, encoder_output: Tensor | None = None
) -> AttentionHeads:
    """Return what an attention layer passes to its kernel for x (1, T, D), without running the kernel."""
    captured: list[AttentionHeads] = []

    def capture(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        captured.append(AttentionHeads(q, k, v, scoring))
        return v.new_zeros(*q.shape[:-1], v.shape[-1])

    attention(x, replace(context, kernel=capture), *(() if encoder_output is None else (encoder_output,)))
    return captured[0]


def select_heads(heads: AttentionHeads, head: int | None, rows: Iterable[int] | None) -> AttentionHeads:
    """Select a head (None: all) and query positions (None: all), after checking their range and the memory needed."""
    num_queries, num_keys = heads.queries.shape[2], heads.keys.shape[2]
    head = None if head is None else check_index("head", head, heads.num_heads)
    positions = range(num_queries) if rows is None else [check_index("row", row, num_queries) for row in rows]
    num_scores = (heads.num_heads if head is None else 1) * len(positions) * num_keys
    if num_scores > MAX_SCORES:
        max_rows = MAX_SCORES // num_keys
        raise ClearheadError(
            f"this request needs {num_scores:,} scores at once, more than {MAX_SCORES:,}; "
            f"request one head with rows=range({min(max_rows, num_queries)})"
        )
    return heads.select(head, torch.tensor(list(positions), dtype=torch.long))


def check_index(kind: str, number: int, count: int, note: str = "") -> int:
    """Return an index from 0 to count - 1; negative numbers count from the end. Raise ClearheadError if out of range.

    kind: what is indexed, for the error message, such as "layer".
    """
    try:
        number = operator.index(number)  # accepts integers of PyTorch and NumPy as well
    except TypeError:
        raise ClearheadError(f"{kind} {number!r} is not an integer from 0 to {count - 1}") from None
    if not -count <= number < count:
        raise ClearheadError(
            f"{kind} {number} is out of range: there are {count}, from 0 to {count - 1}, or from -{count} to -1{note}"
        )
    return number % count
