"""What the attention kernel of one layer was given, and from it the scores and weights of any head and rows.

    weights = heads.only(head=3, rows=torch.arange(8)).attended.weights   # (1, 1, 8, S)

Only this step is quadratic in the number of tokens, so only what is asked for is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import index as as_integer

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.model import AttentionContext, AttentionSteps, Mask, Scoring, attention_steps

MAX_SCORES = 2**29  # numbers computed for one request: 2 GiB in float32


@dataclass(frozen=True)
class Heads:
    queries: Tensor  # (1, N, T, H)
    keys: Tensor  # (1, K, S, H)
    values: Tensor  # (1, K, S, H of values)
    how: Scoring

    @property
    def num_heads(self) -> int:
        return self.queries.shape[1]

    def key_head(self, head: int) -> int:
        """The key-value head that a query head reads."""
        return head // (self.num_heads // self.keys.shape[1])

    def only(self, head: int | None, rows: Tensor) -> "Heads":
        """One head, or all; `rows` (n,) of the queries."""
        how = replace(
            self.how,
            mask=Mask(self.allowed(rows)[None, None]),
            temperature=part(self.how.temperature, 2, rows),
            bias=part(self.how.bias, 2, rows),
        )
        chosen = Heads(self.queries[:, :, rows], self.keys, self.values, how)
        if head is None:
            return chosen
        of_queries, of_keys = torch.tensor([head]), torch.tensor([self.key_head(head)])
        return Heads(
            part_of(chosen.queries, 1, of_queries),
            part_of(chosen.keys, 1, of_keys),
            part_of(chosen.values, 1, of_keys),
            replace(how, bias=part(how.bias, 1, of_queries)),
        )

    def allowed(self, rows: Tensor) -> Tensor:
        """Which keys these queries may look at (n, S)."""
        num_keys, device = self.keys.shape[-2], self.keys.device
        if self.how.mask.causal:
            return torch.arange(num_keys, device=device) <= rows.to(device)[:, None]
        everything = torch.ones(len(rows), num_keys, dtype=torch.bool, device=device)
        allowed = part(self.how.mask.allowed, 2, rows)
        return everything if allowed is None else everything & allowed[0, 0]

    @property
    def attended(self) -> AttentionSteps:
        return attention_steps(self.queries, self.keys, self.values, self.how)


def part(tensor: Tensor | None, dim: int, index: Tensor) -> Tensor | None:
    return None if tensor is None else part_of(tensor, dim, index)


def part_of(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """These entries along `dim`, or the one that serves all."""
    return tensor if tensor.shape[dim] == 1 else tensor.index_select(dim, index.to(tensor.device))


def hear(attention: nn.Module, x: Tensor, context: AttentionContext, encoder_output: Tensor | None = None) -> Heads:
    """What an attention layer hands to its kernel for x (1, T, D), the kernel itself left out."""
    residuals: list[Heads] = []

    def listen(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
        residuals.append(Heads(q, k, v, how))
        return v.new_zeros(*q.shape[:-1], v.shape[-1])

    attention(x, replace(context, kernel=listen), *(() if encoder_output is None else (encoder_output,)))
    return residuals[0]


def chosen(heads: Heads, head: int | None, rows: Iterable[int] | None) -> Heads:
    """Checked, and no more than fits."""
    num_queries, num_keys = heads.queries.shape[2], heads.keys.shape[2]
    head = None if head is None else index("head", head, heads.num_heads)
    numbers = range(num_queries) if rows is None else [index("row", row, num_queries) for row in rows]
    size = (heads.num_heads if head is None else 1) * len(numbers) * num_keys
    if size > MAX_SCORES:
        fitting = MAX_SCORES // num_keys
        raise ClearheadError(
            f"this asks for {size:,} scores at once; ask for one head with rows=range({min(fitting, num_queries)})"
        )
    return heads.only(head, torch.tensor(list(numbers), dtype=torch.long))


def index(what: str, number: int, count: int, note: str = "") -> int:
    """A number from 0 to count - 1; from the end where it is negative."""
    try:
        number = as_integer(number)  # a tensor's or NumPy's too
    except TypeError:
        raise ClearheadError(f"{what} {number!r} is no whole number from 0 to {count - 1}") from None
    if not -count <= number < count:
        raise ClearheadError(f"{what} {number} is out of range: there are {count}, from 0 to {count - 1}{note}")
    return number % count
