"""DeBERTa's attention: queries also meet encoded distances, and keys meet them too (He et al. 2021, §3.1).

The score of query i and key j is (q_i · k_j + q_i · K(r_ij) + k_j · Q(r_ij)) · scale.

r_ij is the row of a table of distances for i - j, and Q and K are the projections of queries and keys. All layers share
the table. Row `num_buckets` stands for distance 0. Up to num_buckets / 2 tokens every distance has its own row; further
ones share rows, which grow logarithmically up to `max_distance`.
"""

import math

import torch
from torch import Tensor, nn

from clearhead.architecture import Disentangled
from clearhead.model.embedding import empty_embedding
from clearhead.model.norms import build_norm


class DistanceTable(nn.Module):
    """The table of distances (2 · num_buckets, D), with a norm."""

    def __init__(self, config: Disentangled, width: int):
        super().__init__()
        self.rows = empty_embedding(2 * config.num_buckets, width)
        self.norm = build_norm(config.norm, width)

    def forward(self) -> Tensor:
        """Return the normalized rows (2 · num_buckets, D)."""
        rows: Tensor = self.norm(self.rows.weight)
        return rows


def distance_rows(distance: Tensor, config: Disentangled) -> Tensor:
    """Return the row of the table for each distance (B or 1, T, S)."""
    half, size = config.num_buckets // 2, distance.abs()
    growth = torch.log(size.clamp(min=half).float() / half) / math.log((config.max_distance - 1) / half)
    coarse = (torch.ceil(growth * (half - 1)) + half).long() * distance.sign()
    bucket = torch.where(size <= half, distance, coarse)
    return (bucket + config.num_buckets).clamp(0, 2 * config.num_buckets - 1)


def distance_scores(q: Tensor, k: Tensor, position_q: Tensor, position_k: Tensor, rows: Tensor) -> Tensor:
    """Return q_i · K(r_ij) + k_j · Q(r_ij), (B, N, T, S).

    q (B, N, T, H), k (B, N, S, H); position_q and position_k (1, N, M, H) are the projected rows of the table, and rows
    (B or 1, 1, T, S) the row of each pair.
    """
    content_to_position = q @ position_k.transpose(-2, -1)  # (B, N, T, M)
    position_to_content = k @ position_q.transpose(-2, -1)  # (B, N, S, M)
    shape = (*content_to_position.shape[:2], -1, -1)
    by_key = rows.transpose(-2, -1)
    first = content_to_position.gather(-1, rows.expand(shape))
    return first + position_to_content.gather(-1, by_key.expand(shape)).transpose(-2, -1)
