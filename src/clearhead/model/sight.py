"""What one kind of attention layer is told besides its input: made once per forward, used by all such layers.

sights = look(stack.layers, grid, positions, ...); layer(x, sights[layer.attention])
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.model.attend import Kernel
from clearhead.model.config import GroupedAttention, LatentAttention, Layer
from clearhead.model.masks import Grid, Mask, make_mask
from clearhead.model.parts import Alibi, Reach, RelativeBuckets, RelativeSinusoid, Rope, SinusoidalPositions
from clearhead.model.positions import Rotation, alibi_bias, bucket_of, rotation_for, sinusoids

AttentionConfig = GroupedAttention | LatentAttention


@dataclass(frozen=True)
class Distances:
    """Transformer-XL: a vector for each distance that occurs, and which one belongs to (query, key)."""

    encodings: Tensor  # (M, D) for the distances from the smallest to the largest
    row: Tensor  # (1, 1, T, S) into M


@dataclass(frozen=True)
class Sight:
    mask: Mask
    kernel: Kernel
    query_index: Tensor  # (1, T)
    rotation: Rotation | None = None
    bias: Tensor | None = None  # (B or 1, N, T, S)
    distances: Distances | None = None
    absorb: bool = False  # latent attention: work on the latent itself


@dataclass(frozen=True)
class Lighting:
    """What all sights of a forward are made from."""

    grid: Grid
    positions: Tensor  # (B or 1, T)
    width: int
    dtype: torch.dtype
    kernel: Kernel
    absorb: bool


def look(
    layers: Iterable[Layer], lighting: Lighting, bucket_table: nn.Embedding | None
) -> dict[AttentionConfig, Sight]:
    masks: dict[Reach, Mask] = {}
    sights: dict[AttentionConfig, Sight] = {}
    for attention in dict.fromkeys(layer.attention for layer in layers):
        if attention.reach not in masks:
            masks[attention.reach] = make_mask(attention.reach, lighting.grid)
        sights[attention] = see(attention, masks[attention.reach], lighting, bucket_table)
    return sights


def see(attention: AttentionConfig, mask: Mask, light: Lighting, bucket_table: nn.Embedding | None) -> Sight:
    distance = light.grid.query_index[:, :, None] - light.grid.key_index[:, None, :]  # (1, T, S)
    rotation, bias, distances = None, None, None
    match attention.position:
        case Rope() as rope:
            turned = attention.head_width if isinstance(attention, GroupedAttention) else attention.rotary_width
            rotation = rotation_for(rope, light.positions, turned, light.dtype)
        case RelativeBuckets() as buckets:
            assert bucket_table is not None
            bias = bucket_table(bucket_of(distance, buckets)).movedim(-1, 1)  # (1, T, S, N) -> (1, N, T, S)
        case Alibi() as alibi:
            bias = alibi_bias(distance, attention.num_heads, alibi, light.dtype)
        case RelativeSinusoid():
            distances = every_distance(distance, light.width, light.dtype)
    return Sight(mask, light.kernel, light.grid.query_index, rotation, bias, distances, light.absorb)


def every_distance(distance: Tensor, width: int, dtype: torch.dtype) -> Distances:
    num_queries, num_keys = distance.shape[-2:]
    smallest = distance[0, 0, -1]  # the first query and the last key
    between = torch.arange(num_queries + num_keys - 1, device=distance.device) + smallest
    encodings = sinusoids(between, width, SinusoidalPositions(layout="halves"), dtype)
    return Distances(encodings, (distance - smallest)[:, None])
