"""Who may look at whom, made once per forward and kind of layer from where queries and keys stand.

    grid = Grid.of(tokens, attention_mask=None); mask = make_mask(Causal(), grid)

True means: may look. With T = S = 5 and rows as queries:

    Causal      SlidingWindow(2)   Chunked(2)    padded left by 2 (causal)
    1 . . . .   1 . . . .   1 . . . .   . . . . .
    1 1 . . .   1 1 . . .   1 1 . . .   . . . . .
    1 1 1 . .   . 1 1 . .   . . 1 . .   . . 1 . .
    1 1 1 1 .   . . 1 1 .   . . 1 1 .   . . 1 1 .
    1 1 1 1 1   . . . 1 1   . . . . 1   . . 1 1 1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.architecture import AttentionPattern, Bidirectional, Causal, Chunked, SlidingWindow
from clearhead.errors import require


@dataclass(frozen=True)
class Mask:
    """What `attend` needs: None allows all; `causal` alone lets the fused kernel skip the upper half."""

    allowed: Tensor | None = None  # bool, broadcastable to (B, 1, T, S)
    causal: bool = False

    def __post_init__(self) -> None:
        require(not (self.causal and self.allowed is not None), "a mask is causal or spelled out, not both")


@dataclass(frozen=True)
class Grid:
    """Where the queries and keys of one forward stand; distances and masks are counted between these numbers."""

    query_index: Tensor  # (B or 1, T)
    key_index: Tensor  # (B or 1, S)
    key_is_real: Tensor | None = None  # (B, S), None: no padding
    query_document: Tensor | None = None  # (B, T), None: one document per row
    key_document: Tensor | None = None  # (B, S)

    first_index: Tensor | int = 0  # (B, 1), of the first real token: chunks are counted from there
    whole: bool = True  # the keys are all tokens up to the last query, in their order

    @staticmethod
    def of(tokens: Tensor, attention_mask: Tensor | None = None) -> "Grid":
        """A whole sequence looking at itself, counted in slots; tokens (B, T)."""
        index = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if attention_mask is None:
            return Grid(index, index)
        real = attention_mask.bool()
        return Grid(index, index, real, first_index=real.int().argmax(dim=1, keepdim=True))

    @staticmethod
    def at(positions: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> "Grid":
        """The same counted in positions (B or 1, T), so that padding adds to no distance."""
        real = None if attention_mask is None else attention_mask.bool()
        return Grid(positions, positions, real, documents, documents)


def make_mask(pattern: AttentionPattern, grid: Grid) -> Mask:
    plain = grid.key_is_real is None and grid.query_document is None
    if plain and isinstance(pattern, Bidirectional):
        return Mask()
    if plain and isinstance(pattern, Causal) and grid.whole:
        num_queries, num_keys = grid.query_index.shape[1], grid.key_index.shape[1]
        if num_queries == num_keys:
            return Mask(causal=True)
        if num_queries == 1:  # the last token sees all
            return Mask()
    allowed = pattern_mask(pattern, grid)
    if grid.key_is_real is not None:
        allowed = allowed & grid.key_is_real[:, None, :]
    if grid.query_document is not None and grid.key_document is not None:
        allowed = allowed & (grid.query_document[:, :, None] == grid.key_document[:, None, :])
    return Mask(allowed[:, None])  # (B, 1, T, S)


def pattern_mask(pattern: AttentionPattern, grid: Grid) -> Tensor:
    """(B or 1, T, S) by reach alone, padding and documents left out."""
    query, key = grid.query_index[:, :, None], grid.key_index[:, None, :]
    match pattern:
        case Bidirectional():
            return torch.ones_like(query - key, dtype=torch.bool)
        case Causal():
            return key <= query
        case SlidingWindow(size=size):
            return (key <= query) & (query - key < size)
        case Chunked(size=size):
            start = torch.as_tensor(grid.first_index, device=query.device).reshape(-1, 1, 1)
            same = (query - start).div(size, rounding_mode="floor") == (key - start).div(size, rounding_mode="floor")
            return (key <= query) & same


def cross_attention_mask(source_mask: Tensor | None) -> Mask:
    """Cross-attention sees every real token of the source (B, S)."""
    return Mask(None if source_mask is None else source_mask.bool()[:, None, None, :])


def places(
    tokens: Tensor, attention_mask: Tensor | None, positions: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Grid]:
    """The positions of a whole sequence (B or 1, T), its own or the caller's, and where its tokens stand to each other.

    The caller's turn and embed, but need not say who comes after whom; those of packed documents do, from 0 in each.
    """
    if positions is not None and documents is None:
        return positions, Grid.of(tokens, attention_mask)
    if positions is None and documents is not None:
        positions = positions_within(documents, attention_mask)
    elif positions is None:
        positions = positions_from(tokens, attention_mask)
    return positions, Grid.at(positions, attention_mask, documents)


def positions_from(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Position of each token among the real ones of its row (B, T): padding never moves a token."""
    if attention_mask is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    return (attention_mask.bool().cumsum(dim=1) - 1).clamp(min=0)


def positions_within(documents: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Position of each token among the real ones of its document (B, T)."""
    earlier = (documents[:, :, None] == documents[:, None, :]).tril()
    if attention_mask is not None:
        earlier = earlier & attention_mask.bool()[:, None, :]
    return (earlier.sum(dim=-1) - 1).clamp(min=0)
