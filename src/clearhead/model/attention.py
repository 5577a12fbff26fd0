"""Grouped attention: multi-head, grouped-query and multi-query in one; self, causal self and cross (book A1-A10).

attention = Attention(GroupedAttention(num_heads=8, num_kv_heads=2, head_width=16), width=128)

x (B, T, D) ─ query ─ (B, N, T, H) ─ clip ─ norm ─ rotate ─┐
x or memory ─ key ─── (B, K, S, H) ─ clip ─ norm ─ rotate ─┼─ kernel ─ (B, N, T, H) ─ merge ─ output ─ (B, T, D)
(B, S, D)   └ value ─ (B, K, S, H) ─ clip ─────────────────┘
"""

import math

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    GroupedAttention,
    HeadNorm,
    QueryTemperature,
    RelativeSinusoid,
    RotatedHeadNorm,
    ScoreTemperature,
)
from clearhead.model.attend import Scoring
from clearhead.model.context import AttentionContext, Distances, KeyValue
from clearhead.model.norms import build_norm, root_mean_square


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
        weighted = config.head_norm.norm if isinstance(config.head_norm, HeadNorm) else None
        self.query_norm = build_norm(weighted, head) if weighted else nn.Identity()
        self.key_norm = build_norm(weighted, head) if weighted else nn.Identity()
        self.relative = RelativeTerm(config, width) if isinstance(config.position, RelativeSinusoid) else None

    def forward(self, x: Tensor, context: AttentionContext, encoder_output: Tensor | KeyValue | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D). For cross-attention memory (B, S, D), or its `keys_and_values`."""
        q = self.norm_and_rotate(self.heads(self.query, x, self.config.num_heads), self.query_norm, context)
        if isinstance(encoder_output, tuple):
            k, v = encoder_output
        else:
            k, v = self.keys_and_values(x if encoder_output is None else encoder_output, context)
            if context.keep is not None:
                k, v = context.keep(k, v)
        bias = context.bias
        if self.relative is not None and context.distances is not None:
            q, bias = self.relative(q, context.distances, self.scale)
        how = Scoring(
            mask=context.mask,
            scale=self.scale,
            softcap=self.config.softcap,
            temperature=self.score_temperature(context, q.dtype),
            bias=bias,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(merge_heads(context.kernel(self.with_query_temperature(q, context), k, v, how)))

    def keys_and_values(self, x: Tensor, context: AttentionContext) -> KeyValue:
        """All that later queries need of x (B, S, D); values never carry position (book B2)."""
        kv_heads = self.config.num_kv_heads
        key = self.norm_and_rotate(self.heads(self.key, x, kv_heads), self.key_norm, context)
        return key, self.heads(self.value, x, kv_heads)

    def heads(self, projection: nn.Linear, x: Tensor, num_heads: int) -> Tensor:
        """(B, T, D) -> (B, N or K, T, H)."""
        projected = projection(x)
        if self.config.clip is not None:
            projected = projected.clamp(-self.config.clip, self.config.clip)
        return split_heads(projected, num_heads)

    def norm_and_rotate(self, part: Tensor, norm: nn.Module, context: AttentionContext) -> Tensor:
        """Of queries or keys."""
        part = norm(part)
        if context.rotation is not None:
            part = context.rotation.rotate(part)
        if isinstance(self.config.head_norm, RotatedHeadNorm):
            part = root_mean_square(part, self.config.head_norm.epsilon).to(part.dtype)
        return part

    def with_query_temperature(self, q: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(self.config.temperature, QueryTemperature):
            return q
        steps = (context.query_index[:, None, :, None] + 1) // self.config.temperature.floor
        growth = torch.log1p(steps.to(torch.promote_types(q.dtype, torch.float32)))
        return q * (1 + self.config.temperature.scale * growth).to(q.dtype)

    def score_temperature(self, context: AttentionContext, dtype: torch.dtype) -> Tensor | None:
        if not isinstance(self.config.temperature, ScoreTemperature):
            return None
        length = self.config.temperature.length
        index = context.query_index[:, None, :, None].clamp(min=length)  # 1 up to `length`
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
