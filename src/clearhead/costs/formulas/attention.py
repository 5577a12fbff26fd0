"""The matrix products of attention, grouped and latent, self and cross, and how many keys the queries attend to.

    for operation in attention_operations(layer, workload, length=1, is_decoder=True): ...

The kernel receives all keys that the cache returns: a sliding store returns all slots that it has allocated, including
those outside the window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from clearhead.architecture import (
    AttentionPattern,
    Bidirectional,
    Causal,
    CenteredWindow,
    Chunked,
    GroupedAttention,
    LatentAttention,
    Layer,
    ModelConfig,
    RelativeBuckets,
    RelativeSinusoid,
    ScoreTemperature,
    SlidingWindow,
)
from clearhead.cache import KeyValueCache, key_value_shape
from clearhead.costs.formulas.matrix_products import Operation, Size, linear_operation
from clearhead.costs.formulas.workload import DeviceType, Workload
from clearhead.model import is_fusible

# --- keys and pairs


@dataclass(frozen=True)
class AttentionSize:
    """Numbers of queries and keys of one sequence."""

    num_queries: int
    num_keys: int  # keys that the kernel receives
    num_allowed_pairs: int  # pairs of query and key that the mask allows

    @property
    def num_pairs(self) -> int:
        """Pairs of query and key that the kernel receives."""
        return self.num_queries * self.num_keys


def self_attention_size(layer: Layer, workload: Workload, length: int, is_decoder: bool) -> AttentionSize:
    """Return how many keys the last `length` tokens attend to in one layer."""
    start = workload.context - length if is_decoder else 0
    num_allowed_pairs = allowed_pairs(layer.attention.pattern, start, length)
    if not is_decoder or workload.phase == "train":
        return AttentionSize(length, length, num_allowed_pairs)
    return AttentionSize(length, num_cached_keys(layer, workload.config, start, length), num_allowed_pairs)


def num_cached_keys(layer: Layer, config: ModelConfig, start: int, length: int) -> int:
    """Return how many keys the cache passes to this layer's kernel for `length` tokens after `start` others."""
    assert config.decoder is not None
    store = KeyValueCache(config).stores[config.decoder.layers.index(layer)]
    with torch.device("meta"):  # only the length of the tensor is needed, and a context may be long
        return len(store.token_indices(start, length))


def allowed_pairs(pattern: AttentionPattern, start: int, length: int) -> int:
    """Return the number of keys that the queries at start … start + length - 1 may attend to, summed over queries."""
    end = start + length
    match pattern:
        case Bidirectional():
            return length * end
        case Causal():
            return _triangle(end) - _triangle(start)
        case SlidingWindow(size=size):
            return _windowed_pairs(end, size) - _windowed_pairs(start, size)
        case CenteredWindow(reach=reach):
            return 2 * (_windowed_pairs(end, reach + 1) - _windowed_pairs(start, reach + 1)) - length
        case Chunked(size=size):
            return _chunked_pairs(end, size) - _chunked_pairs(start, size)


def _triangle(length: int) -> int:
    """Return 1 + 2 + … + length, the number of causal pairs."""
    return length * (length + 1) // 2


def _windowed_pairs(length: int, size: int) -> int:
    short = min(length, size)
    return _triangle(short) + (length - short) * size


def _chunked_pairs(length: int, size: int) -> int:
    return length // size * _triangle(size) + _triangle(length % size)


# --- kernels


def _is_absorbed(workload: Workload, num_queries: int) -> bool:
    """Return whether latent attention works on the cached latents, as inference does for one query (cache/step.py)."""
    return workload.phase != "train" and num_queries == 1


def _is_fused(attention: GroupedAttention | LatentAttention, workload: Workload, num_queries: int) -> bool:
    """Return whether `fused_attention` runs a fused kernel; otherwise the scores are written to memory."""
    is_training = workload.phase == "train"
    has_learned_bias = False
    if isinstance(attention, LatentAttention):
        widths = _latent_score_widths(attention, _is_absorbed(workload, num_queries))
    else:
        has_score_temperature = isinstance(attention.temperature, ScoreTemperature)
        temperature = attention.temperature if has_score_temperature else None
        if attention.sinks or not is_fusible(attention.softcap, temperature):
            return False
        widths = key_value_shape(attention)[1:]
        has_learned_bias = isinstance(attention.position, RelativeBuckets | RelativeSinusoid)
    return has_fused_kernel(
        workload.device_type,
        *widths,
        dropout=workload.config.dropout.attention if is_training else 0.0,
        needs_bias_gradient=is_training and has_learned_bias,
    )


def has_fused_kernel(
    device_type: DeviceType, query_width: int, value_width: int, *, dropout: float, needs_bias_gradient: bool
) -> bool:
    """Return whether scaled_dot_product_attention has a fused kernel for this case.

    No kernel computes the gradient of a bias. The CPU kernel supports neither dropout nor values of another width than
    the queries. Observed with torch 2.13.
    """
    if needs_bias_gradient:
        return False
    return device_type != "cpu" or (query_width == value_width and not dropout)


def _latent_score_widths(attention: LatentAttention, absorbed: bool) -> tuple[int, int]:
    """Return the widths of queries and values in the scores of latent attention."""
    if absorbed:
        return attention.latent_rank + attention.rotary_width, attention.latent_rank
    return attention.plain_width + attention.rotary_width, attention.value_width


# --- operations


def attention_operations(layer: Layer, workload: Workload, length: int, is_decoder: bool) -> Iterator[Operation]:
    """Yield the operations of self-attention and cross-attention of one layer for `length` tokens per sequence."""
    size = self_attention_size(layer, workload, length, is_decoder)
    match layer.attention:
        case GroupedAttention() as attention:
            yield from _grouped_operations(attention, workload, size)
        case LatentAttention() as attention:
            yield from _latent_operations(attention, workload, size)
    if layer.cross_attention is not None:
        cross_size = AttentionSize(length, workload.source, length * workload.source)
        yield from _cross_operations(layer.cross_attention, workload, cross_size)


def _grouped_operations(attention: GroupedAttention, workload: Workload, size: AttentionSize) -> Iterator[Operation]:
    tokens, width = _token_and_width_sizes(workload, size)
    num_kv_heads, head_width, value_width = key_value_shape(attention)
    num_heads, kv_elements = attention.num_heads, num_kv_heads * (head_width + value_width)
    yield linear_operation("query, key, value", tokens, width, Size("(N + 2K)·H", num_heads * head_width + kv_elements))
    if isinstance(attention.position, RelativeSinusoid):
        yield from _distance_operations(attention, workload, size)
    heads = _ScoreHeads(num_heads, head_width, value_width, kv_elements)
    yield from _score_operations(heads, workload, size, _is_fused(attention, workload, size.num_queries))
    yield linear_operation("output", tokens, Size("N·H", num_heads * value_width), width)


def _cross_operations(attention: GroupedAttention, workload: Workload, size: AttentionSize) -> Iterator[Operation]:
    """Yield the operations of cross-attention; at inference the keys and values of the source already exist."""
    tokens, width = _token_and_width_sizes(workload, size)
    num_kv_heads, head_width, value_width = key_value_shape(attention)
    num_heads, kv_elements = attention.num_heads, num_kv_heads * (head_width + value_width)
    yield linear_operation("cross query", tokens, width, Size("N·H", num_heads * head_width))
    if workload.phase == "train":
        yield cross_key_value_operation(attention, workload)
    heads = _ScoreHeads(num_heads, head_width, value_width, kv_elements)
    for operation in _score_operations(heads, workload, size, _is_fused(attention, workload, size.num_queries)):
        yield replace(operation, name=f"cross {operation.name}")
    yield linear_operation("cross output", tokens, Size("N·H", num_heads * value_width), width)


def cross_key_value_operation(attention: GroupedAttention, workload: Workload) -> Operation:
    """Return the projection of the encoder output to the keys and values of one cross-attention."""
    num_kv_heads, head_width, value_width = key_value_shape(attention)
    tokens, width = Size("B·S", workload.batch * workload.source), Size("D", workload.config.width)
    outputs = Size("2K·H", num_kv_heads * (head_width + value_width))
    return linear_operation("cross key, value", tokens, width, outputs)


def _latent_operations(attention: LatentAttention, workload: Workload, size: AttentionSize) -> Iterator[Operation]:
    tokens, width = _token_and_width_sizes(workload, size)
    num_heads, plain_width, value_width = attention.num_heads, attention.plain_width, attention.value_width
    rank, rotary_width = attention.latent_rank, attention.rotary_width
    queries = Size("N·(p + r)", num_heads * (plain_width + rotary_width))
    if attention.query_rank is None:
        yield linear_operation("query", tokens, width, queries)
    else:
        yield linear_operation("query down", tokens, width, Size("Rq", attention.query_rank))
        yield linear_operation("query up", tokens, Size("Rq", attention.query_rank), queries)
    yield linear_operation("latent", tokens, width, Size("R + r", rank + rotary_width))
    absorbed, fused = _is_absorbed(workload, size.num_queries), _is_fused(attention, workload, size.num_queries)
    score_widths = _latent_score_widths(attention, absorbed)
    if absorbed:
        all_heads = Size("B·T·N", tokens.number * num_heads)
        yield linear_operation("absorb key", all_heads, Size("p", plain_width), Size("R", rank), num_heads)
        yield from _score_operations(_ScoreHeads(num_heads, *score_widths, rank + rotary_width), workload, size, fused)
        yield linear_operation("absorb value", all_heads, Size("R", rank), Size("v", value_width), num_heads)
    else:
        latents = Size("B·S", workload.batch * size.num_keys)
        unfolded = Size("N·(p + v)", num_heads * (plain_width + value_width))
        yield linear_operation("unfold latent", latents, Size("R", rank), unfolded)
        heads = _ScoreHeads(num_heads, *score_widths, num_heads * (plain_width + rotary_width + value_width))
        yield from _score_operations(heads, workload, size, fused)
    yield linear_operation("output", tokens, Size("N·v", num_heads * value_width), width)


def _token_and_width_sizes(workload: Workload, size: AttentionSize) -> tuple[Size, Size]:
    return Size("B·T", workload.batch * size.num_queries), Size("D", workload.config.width)


@dataclass(frozen=True)
class _ScoreHeads:
    """Heads as the attention kernel sees them."""

    num_heads: int
    query_width: int
    value_width: int
    kv_elements: int  # elements of the keys and values of one token


def _score_operations(heads: _ScoreHeads, workload: Workload, size: AttentionSize, fused: bool) -> Iterator[Operation]:
    """Yield Q Kᵀ and A V. A fused backward recomputes the scores: three products for the first, two for the second."""
    batch, num_heads = workload.batch, heads.num_heads
    pair_flops, allowed_pair_flops = (2 * batch * num_heads * num for num in (size.num_pairs, size.num_allowed_pairs))
    key_elements = heads.kv_elements * heads.query_width // (heads.query_width + heads.value_width)
    num_scores = batch * num_heads * size.num_pairs
    scores, fused_scores = (0, num_scores) if fused else (num_scores, 0)
    score_traffic = " [+ B·N·T·S]" if fused else " + B·N·T·S"
    yield Operation(
        name="scores",
        formula="2·B·N·T·S·H",
        traffic=f"B·(T·N + S·K)·H{score_traffic}",
        flops=pair_flops * heads.query_width,
        allowed_flops=allowed_pair_flops * heads.query_width,
        inputs=batch * (num_heads * heads.query_width * size.num_queries + key_elements * size.num_keys),
        scores=scores,
        fused_scores=fused_scores,
        backward_factor=3 if fused else 2,
    )
    yield Operation(
        name="weighted sum",
        formula="2·B·N·T·S·H",
        traffic=f"B·(S·K + T·N)·H{score_traffic}",
        flops=pair_flops * heads.value_width,
        allowed_flops=allowed_pair_flops * heads.value_width,
        inputs=batch * (heads.kv_elements - key_elements) * size.num_keys,
        outputs=batch * num_heads * heads.value_width * size.num_queries,
        scores=scores,
        fused_scores=fused_scores,
    )


def _distance_operations(attention: GroupedAttention, workload: Workload, size: AttentionSize) -> Iterator[Operation]:
    """Yield the products of Transformer-XL with T + S - 1 distances: a projection of each, and scores of each query."""
    distances = Size("(T + S)", size.num_queries + size.num_keys - 1)
    num_heads, head_width = attention.num_heads, attention.head_width
    width, heads = Size("D", workload.config.width), Size("N·H", num_heads * head_width)
    # Sinusoids are constants, so the backward computes the gradient of the matrix only.
    yield replace(linear_operation("distances", distances, width, heads), backward_factor=1)
    num_queries = workload.batch * num_heads * size.num_queries
    flops = 2 * num_queries * distances.number * head_width
    yield Operation(
        name="distance scores",
        formula="2·B·N·T·(T + S)·H",
        traffic="(B·T + T + S)·N·H + B·N·T·(T + S)",
        flops=flops,
        allowed_flops=flops,
        inputs=num_queries * head_width + num_heads * distances.number * head_width,
        outputs=num_queries * distances.number,
    )
