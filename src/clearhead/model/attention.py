"""Grouped attention: multi-head, grouped-query and multi-query in one; self, causal self and cross (book A1-A10).

attention = Attention(GroupedAttention(num_heads=8, num_kv_heads=2, head_width=16), width=128)

x (B, T, D) ─ query ─ (B, N, T, H) ─ clip ─ norm ─ rotate ─┐
x or memory ─ key ─── (B, K, S, H) ─ clip ─ norm ─ rotate ─┼─ kernel ─ (B, N, T, H) ─ merge ─ output ─ (B, T, D)
(B, S, D)   └ value ─ (B, K, S, H) ─ clip ─────────────────┘
"""

import math

import torch
from torch import Tensor, nn

from clearhead.model.attend import Scoring
from clearhead.model.config import GroupedAttention, HeadNorm, QueryTemperature, RotatedHeadNorm, ScoreTemperature
from clearhead.model.norms import build_norm, root_mean_square
from clearhead.model.parts import RelativeSinusoid
from clearhead.model.sight import Distances, Sight


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, N·H) -> (B, N, T, H)."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N·H)."""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, config: GroupedAttention, width: int, dropout: float = 0.0):
        super().__init__()
        self.config, self.dropout = config, dropout
        heads, kv_heads, head = config.num_heads, config.num_kv_heads, config.head_width
        value = config.value_width or head
        self.scale = head**-0.5 if config.scale is None else config.scale
        self.query = nn.Linear(width, heads * head, bias=config.input_bias)
        self.key = nn.Linear(width, kv_heads * head, bias=config.input_bias)
        self.value = nn.Linear(width, kv_heads * value, bias=config.input_bias)
        self.output = nn.Linear(heads * value, width, bias=config.output_bias)
        if isinstance(config.head_norm, HeadNorm):
            self.query_norm = build_norm(config.head_norm.norm, head)
            self.key_norm = build_norm(config.head_norm.norm, head)
        self.relative = RelativeTerm(config, width) if isinstance(config.position, RelativeSinusoid) else None

    def forward(self, x: Tensor, sight: Sight, memory: Tensor | None = None) -> Tensor:
        """x (B, T, D), memory (B, S, D) for cross-attention -> (B, T, D)."""
        q, k, v = self.project(x, x if memory is None else memory)
        q, k = self.place(q, k, sight)
        bias = sight.bias
        if self.relative is not None and sight.distances is not None:
            q, bias = self.relative(q, sight.distances, self.scale)
        how = Scoring(
            mask=sight.mask,
            scale=self.scale,
            softcap=self.config.softcap,
            temperature=self.score_temperature(sight, q.dtype),
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(merge_heads(sight.kernel(q, k, v, how)))

    def project(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.query(x), self.key(memory), self.value(memory)
        if self.config.clip is not None:
            q, k, v = (part.clamp(-self.config.clip, self.config.clip) for part in (q, k, v))
        kv_heads = self.config.num_kv_heads
        return split_heads(q, self.config.num_heads), split_heads(k, kv_heads), split_heads(v, kv_heads)

    def place(self, q: Tensor, k: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
        """Norms and position of queries and keys; values never carry position (book B2)."""
        norm = self.config.head_norm
        if isinstance(norm, HeadNorm):
            q, k = self.query_norm(q), self.key_norm(k)
        if sight.rotation is not None:
            q, k = sight.rotation.turn(q), sight.rotation.turn(k)
        if isinstance(norm, RotatedHeadNorm):
            q, k = (root_mean_square(part, norm.epsilon).to(part.dtype) for part in (q, k))
        if isinstance(self.config.temperature, QueryTemperature):
            steps = (sight.query_index[:, None, :, None] + 1) // self.config.temperature.floor
            growth = torch.log1p(steps.to(torch.promote_types(q.dtype, torch.float32)))
            q = q * (1 + self.config.temperature.scale * growth).to(q.dtype)
        return q, k

    def score_temperature(self, sight: Sight, dtype: torch.dtype) -> Tensor | None:
        if not isinstance(self.config.temperature, ScoreTemperature):
            return None
        length = self.config.temperature.length
        index = sight.query_index[:, None, :, None].clamp(min=length)  # 1 up to `length`
        return torch.log2(index.to(torch.promote_types(dtype, torch.float32))) / math.log2(length)


class RelativeTerm(nn.Module):
    """The learned parts of Transformer-XL's score: (q + u)·k + (q + v)·W_r R. Its u is ours `content_bias`."""

    def __init__(self, config: GroupedAttention, width: int):
        super().__init__()
        heads, head = config.num_heads, config.head_width
        self.projection = nn.Linear(width, heads * head, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, head))
        self.distance_bias = nn.Parameter(torch.zeros(heads, head))

    def forward(self, q: Tensor, distances: Distances, scale: float) -> tuple[Tensor, Tensor]:
        """q (B, N, T, H) -> the query for the keys, and the scaled scores of the distances (B, N, T, S)."""
        by_distance = split_heads(self.projection(distances.encodings)[None], q.shape[1])  # (1, N, M, H)
        scores = (q + self.distance_bias[:, None]) @ by_distance.transpose(-2, -1)  # (B, N, T, M)
        rows = distances.row.expand(*scores.shape[:2], -1, -1)
        return q + self.content_bias[:, None], scores.gather(-1, rows) * scale
