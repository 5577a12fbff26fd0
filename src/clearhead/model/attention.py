"""Multi-head, grouped-query and multi-query attention, as self-attention or cross-attention (book A1-A10).

    attention = Attention(GroupedAttention(num_heads=8, num_kv_heads=2, head_width=16), width=128)

Keys and values are computed from x, or from the encoder output in cross-attention. The kernel (attend.py) computes
softmax(q kᵀ · scale) v.

    x (B, T, D) ──── query ─ (B, N, T, H) ─ clip ─ norm ─ rotate ─┐
    x or encoder ─┬─ key ─── (B, K, S, H) ─ clip ─ norm ─ rotate ─┼─ kernel ─ (B, N, T, H) ─ merge ─ output ─ (B, T, D)
    output        └─ value ─ (B, K, S, H) ─ clip ─────────────────┘
    (B, S, D)
"""

import math

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    Disentangled,
    GroupedAttention,
    HeadNorm,
    QueryTemperature,
    RelativeBuckets,
    RelativeSinusoid,
    RotatedHeadNorm,
    ScoreTemperature,
)
from clearhead.model.attend import Scoring
from clearhead.model.context import AttentionContext, KeyValue, RelativeEncodings
from clearhead.model.disentangled import distance_scores
from clearhead.model.embedding import empty_embedding
from clearhead.model.norms import build_head_norm, root_mean_square


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, T, N·H) -> (B, N, T, H)."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, N, T, H) -> (B, T, N·H)."""
    return x.transpose(1, 2).flatten(2)


def temperature_factors(config: QueryTemperature | ScoreTemperature, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors on queries or scores at these query indices (B or 1, T), in at least float32."""
    compute_dtype = torch.promote_types(dtype, torch.float32)
    match config:
        case QueryTemperature(floor=floor, scale=scale):
            return 1 + scale * torch.log1p(((index + 1) // floor).to(compute_dtype))
        case ScoreTemperature(length=length):  # the factor is 1 up to `length`
            return torch.log2(index.clamp(min=length).to(compute_dtype)) / math.log2(length)


class Attention(nn.Module):
    """Grouped attention: N query heads share K key-value heads."""

    def __init__(self, config: GroupedAttention, width: int, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.dropout = dropout
        num_heads, num_kv_heads, head_width = config.num_heads, config.num_kv_heads, config.head_width
        value_width = config.value_width or head_width
        self.scale = head_width**-0.5 if config.scale is None else config.scale
        self.query = nn.Linear(width, num_heads * head_width, bias=config.input_bias)
        self.key = nn.Linear(width, num_kv_heads * head_width, bias=config.input_bias and config.key_bias)
        self.value = nn.Linear(width, num_kv_heads * value_width, bias=config.input_bias)
        self.output = nn.Linear(num_heads * value_width, width, bias=config.output_bias)
        norm = config.head_norm if isinstance(config.head_norm, HeadNorm) else None
        self.query_norm = build_head_norm(norm, num_heads, head_width) if norm else nn.Identity()
        self.key_norm = build_head_norm(norm, num_kv_heads, head_width) if norm else nn.Identity()
        self.norm_after_rotation = norm is not None and norm.after_rotation
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if config.sinks else None
        self.relative = _RelativeTerm(config, width) if isinstance(config.position, RelativeSinusoid) else None
        self.relative_bias = None
        if isinstance(config.position, RelativeBuckets) and config.position.per_layer:
            self.relative_bias = empty_embedding(config.position.num_buckets, num_heads)

    def forward(self, x: Tensor, context: AttentionContext, encoder_output: Tensor | KeyValue | None = None) -> Tensor:
        """x (B, T, D) -> (B, T, D).

        encoder_output: for cross-attention, hidden states (B, S, D) or the `keys_and_values` computed from them.
        """
        q = self.norm_and_rotate(self.project(self.query, x, self.config.num_heads), self.query_norm, context)
        if isinstance(encoder_output, tuple):
            k, v = encoder_output
        else:
            k, v = self.keys_and_values(x if encoder_output is None else encoder_output, context)
            if context.write_cache is not None:
                k, v = context.write_cache(k, v)
        bias = context.bias
        if self.relative_bias is not None:
            bias = self.relative_bias(context.buckets).movedim(-1, 1)  # (B, T, S, N) -> (B, N, T, S)
        if isinstance(self.config.position, Disentangled) and context.relative is not None:
            bias = self.distance_bias(q, k, context.relative)
        if self.relative is not None and context.relative is not None:
            q, bias = self.relative(q, context.relative, self.scale)
        scoring = Scoring(
            mask=context.mask,
            scale=self.scale,
            softcap=self.config.softcap,
            temperature=self.score_temperature(context, q.dtype),
            bias=bias,
            sinks=self.sinks,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(merge_heads(context.kernel(self.apply_query_temperature(q, context), k, v, scoring)))

    def distance_bias(self, q: Tensor, k: Tensor, relative: RelativeEncodings) -> Tensor:
        """Return the scaled scores of queries and keys with encoded distances (B, N, T, S), for DeBERTa."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        position_q = self.project(self.query, relative.encodings[None], num_heads)
        position_k = self.project(self.key, relative.encodings[None], num_kv_heads)
        k, position_k = (each.repeat_interleave(num_heads // num_kv_heads, dim=1) for each in (k, position_k))
        return distance_scores(q, k, position_q, position_k, relative.index) * self.scale

    def keys_and_values(self, x: Tensor, context: AttentionContext) -> KeyValue:
        """Return the keys and values of x (B, S, D). Values never contain the position (book B2)."""
        num_kv_heads = self.config.num_kv_heads
        key = self.norm_and_rotate(self.project(self.key, x, num_kv_heads), self.key_norm, context)
        return key, self.project(self.value, x, num_kv_heads)

    def project(self, projection: nn.Linear, x: Tensor, num_heads: int) -> Tensor:
        """Project x (B, T, D), clip, and split into heads (B, N or K, T, H)."""
        projected = projection(x)
        if self.config.clip is not None:
            projected = projected.clamp(-self.config.clip, self.config.clip)
        return split_heads(projected, num_heads)

    def norm_and_rotate(self, heads: Tensor, norm: nn.Module, context: AttentionContext) -> Tensor:
        """Normalize and rotate queries or keys (B, N or K, T, H)."""
        if not self.norm_after_rotation:
            heads = norm(heads)
        if context.rotation is not None:
            heads = context.rotation.rotate(heads)
        if self.norm_after_rotation:
            heads = norm(heads)
        if isinstance(self.config.head_norm, RotatedHeadNorm):
            heads = root_mean_square(heads, self.config.head_norm.epsilon).to(heads.dtype)
        return heads

    def apply_query_temperature(self, q: Tensor, context: AttentionContext) -> Tensor:
        """Multiply the queries by Llama 4's temperature, if the config has one."""
        if not isinstance(self.config.temperature, QueryTemperature):
            return q
        factors = temperature_factors(self.config.temperature, context.query_index, q.dtype)
        return q * factors[:, None, :, None].to(q.dtype)

    def score_temperature(self, context: AttentionContext, dtype: torch.dtype) -> Tensor | None:
        """Return Grok 2's factor on the scores (B or 1, 1, T, 1), or None without a ScoreTemperature."""
        if not isinstance(self.config.temperature, ScoreTemperature):
            return None
        return temperature_factors(self.config.temperature, context.query_index, dtype)[:, None, :, None]


class _RelativeTerm(nn.Module):
    """The learned parts of Transformer-XL's score (q + u)·k + (q + v)·W_r R.

    `content_bias` is the paper's u, `distance_bias` is v, and `projection` is W_r.
    """

    def __init__(self, config: GroupedAttention, width: int):
        super().__init__()
        num_heads, head_width = config.num_heads, config.head_width
        self.projection = nn.Linear(width, num_heads * head_width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, head_width))
        self.distance_bias = nn.Parameter(torch.zeros(num_heads, head_width))

    def forward(self, q: Tensor, relative: RelativeEncodings, scale: float) -> tuple[Tensor, Tensor]:
        """q (B, N, T, H) -> q + u, the queries for the keys, and the scaled term of the distances (B, N, T, S)."""
        encodings = split_heads(self.projection(relative.encodings)[None], q.shape[1])  # (1, N, M, H)
        scores = (q + self.distance_bias[:, None]) @ encodings.transpose(-2, -1)  # (B, N, T, M)
        index = relative.index.expand(*scores.shape[:2], -1, -1)
        return q + self.content_bias[:, None], scores.gather(-1, index) * scale
