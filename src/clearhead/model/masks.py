"""Who may look at whom, made once per forward and kind of layer from where queries and keys stand.

    grid = Grid.of(tokens, attention_mask=None); mask = make_mask(Causal(), grid)

True means: may look. With T = S = 5 and rows as queries:

    Causal      Window(2)   Chunk(2)    padded left by 2 (causal)
    1 . . . .   1 . . . .   1 . . . .   . . . . .
    1 1 . . .   1 1 . . .   1 1 . . .   . . . . .
    1 1 1 . .   . 1 1 . .   . . 1 . .   . . 1 . .
    1 1 1 1 .   . . 1 1 .   . . 1 1 .   . . 1 1 .
    1 1 1 1 1   . . . 1 1   . . . . 1   . . 1 1 1
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.model.parts import Causal, Chunk, Everything, Reach, Window


@dataclass(frozen=True)
class Mask:
    """What `attend` needs: None allows all; `causal` alone lets the fused kernel skip the upper half."""

    allowed: Tensor | None = None  # bool, broadcastable to (B, 1, T, S)
    causal: bool = False


@dataclass(frozen=True)
class Grid:
    """Where the queries and keys of one forward stand: slots in the sequence, padding and documents."""

    query_index: Tensor  # (1, T)
    key_index: Tensor  # (1, S)
    key_is_real: Tensor | None = None  # (B, S), None: no padding
    query_document: Tensor | None = None  # (B, T), None: one document per row
    key_document: Tensor | None = None  # (B, S)

    @staticmethod
    def of(tokens: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None) -> "Grid":
        """A whole sequence looking at itself; tokens (B, T)."""
        index = torch.arange(tokens.shape[1], device=tokens.device)[None]
        real = None if attention_mask is None else attention_mask.bool()
        return Grid(index, index, real, documents, documents)

    @property
    def num_left_padding(self) -> Tensor | int:
        """Slots before the first real token, (B, 1): chunks are counted from there."""
        if self.key_is_real is None:
            return 0
        return self.key_is_real.int().argmax(dim=1, keepdim=True)


def make_mask(reach: Reach, grid: Grid) -> Mask:
    plain = grid.key_is_real is None and grid.query_document is None
    if plain and isinstance(reach, Everything):
        return Mask()
    if plain and isinstance(reach, Causal) and grid.query_index.shape == grid.key_index.shape:
        return Mask(causal=True)
    allowed = reach_mask(reach, grid)
    if grid.key_is_real is not None:
        allowed = allowed & grid.key_is_real[:, None, :]
    if grid.query_document is not None and grid.key_document is not None:
        allowed = allowed & (grid.query_document[:, :, None] == grid.key_document[:, None, :])
    return Mask(allowed[:, None])  # (B, 1, T, S)


def reach_mask(reach: Reach, grid: Grid) -> Tensor:
    """(B or 1, T, S) by reach alone, padding and documents left out."""
    query, key = grid.query_index[:, :, None], grid.key_index[:, None, :]
    match reach:
        case Everything():
            return (query == query) & (key == key)
        case Causal():
            return key <= query
        case Window(size=size):
            return (key <= query) & (query - key < size)
        case Chunk(size=size):
            start = torch.as_tensor(grid.num_left_padding, device=query.device).reshape(-1, 1, 1)
            same = (query - start).div(size, rounding_mode="floor") == (key - start).div(size, rounding_mode="floor")
            return (key <= query) & same


def memory_mask(source_mask: Tensor | None) -> Mask:
    """Cross-attention sees every real token of the source (B, S)."""
    return Mask(None if source_mask is None else source_mask.bool()[:, None, None, :])


def positions_from(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Position of each token among the real ones of its row (B, T): padding never moves a token."""
    if attention_mask is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
