"""What one kind of attention layer is told besides its input: made once per forward, used by all such layers.

    contexts = contexts_for(stack.layers, forward, bucket_table); block(x, contexts[layer.attention])

Its mask and its positions; the kernel to use; and, with a cache, its layer's place there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    Alibi,
    AttentionPattern,
    GroupedAttention,
    LatentAttention,
    Layer,
    RelativeBuckets,
    RelativeSinusoid,
    Rope,
    SinusoidalPositions,
)
from clearhead.model.attend import AttentionKernel
from clearhead.model.masks import Grid, Mask, make_mask
from clearhead.model.positions import Rotation, alibi_bias, bucket_of, rotation_for, sinusoids

AttentionConfig = GroupedAttention | LatentAttention
HALVES = SinusoidalPositions(layout="halves")  # Transformer-XL's R


@dataclass(frozen=True)
class Distances:
    """Transformer-XL: a vector for each distance that occurs, and which one belongs to (query, key)."""

    encodings: Tensor  # (M, D) for the distances from the smallest to the largest
    row: Tensor  # (B or 1, 1, T, S) into M


KeyValue = tuple[Tensor, Tensor]


class Cache(Protocol):
    """Past tokens, as the network sees them. Whoever runs the network moves it on (cache/cache.py)."""

    def begin(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Take note of new tokens (B, T); their positions (B or 1, T)."""

    def grid(self, pattern: AttentionPattern) -> Grid:
        """Where the new tokens and the keys kept for layers of this reach stand."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> KeyValue:
        """Keep what is new (B, K, T, H); give back all that is kept (B, K, S, H)."""


@dataclass(frozen=True)
class AttentionContext:
    mask: Mask
    kernel: AttentionKernel
    query_index: Tensor  # (B or 1, T)
    rotation: Rotation | None = None
    bias: Tensor | None = None  # (B or 1, N, T, S)
    distances: Distances | None = None
    absorb: bool = False  # latent attention: work on the latent itself
    keep: Callable[[Tensor, Tensor], KeyValue] | None = None  # this layer's place in the cache


@dataclass(frozen=True)
class ForwardContext:
    """What the contexts of all layers are made from."""

    grid: Callable[[AttentionPattern], Grid]
    positions: Tensor  # (B or 1, T)
    width: int
    dtype: torch.dtype
    kernel: AttentionKernel
    absorb: bool


def contexts_for(
    layers: Iterable[Layer], forward: ForwardContext, bucket_table: nn.Embedding | None
) -> dict[AttentionConfig, AttentionContext]:
    grids: dict[AttentionPattern, Grid] = {}
    masks: dict[AttentionPattern, Mask] = {}
    contexts: dict[AttentionConfig, AttentionContext] = {}
    for attention in dict.fromkeys(layer.attention for layer in layers):
        pattern = attention.pattern
        if pattern not in masks:
            grids[pattern] = forward.grid(pattern)
            masks[pattern] = make_mask(pattern, grids[pattern])
        contexts[attention] = context_for(attention, grids[pattern], masks[pattern], forward, bucket_table)
    return contexts


def context_for(
    attention: AttentionConfig, grid: Grid, mask: Mask, forward: ForwardContext, bucket_table: nn.Embedding | None
) -> AttentionContext:
    rotation, bias, distances = None, None, None
    match attention.position:
        case Rope() as rope:
            turned = attention.head_width if isinstance(attention, GroupedAttention) else attention.rotary_width
            rotation = rotation_for(rope, forward.positions, turned, forward.dtype)
        case RelativeBuckets() as buckets:
            assert bucket_table is not None
            bias = bucket_table(bucket_of(distance(grid), buckets)).movedim(-1, 1)  # (B, T, S, N) -> (B, N, T, S)
        case Alibi() as alibi:
            bias = alibi_bias(distance(grid), attention.num_heads, alibi, forward.dtype)
        case RelativeSinusoid():
            distances = every_distance(distance(grid), forward.width, forward.dtype)
    return AttentionContext(mask, forward.kernel, grid.query_index, rotation, bias, distances, forward.absorb)


def distance(grid: Grid) -> Tensor:
    """From key to query, (B or 1, T, S)."""
    return grid.query_index[:, :, None] - grid.key_index[:, None, :]


def every_distance(distance: Tensor, width: int, dtype: torch.dtype) -> Distances:
    """The T queries are the last of S tokens: distances run from 1 - T to S - 1."""
    num_queries, num_keys = distance.shape[-2:]
    smallest, count = 1 - num_queries, num_queries + num_keys - 1
    between = torch.arange(smallest, smallest + count, device=distance.device)
    encodings = sinusoids(between, width, HALVES, dtype)
    # A query in the padding has no such place; its row is nobody's.
    return Distances(encodings, (distance - smallest).clamp(0, count - 1)[:, None])
