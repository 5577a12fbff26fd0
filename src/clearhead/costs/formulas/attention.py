"""The products of attention, grouped and latent, self and cross, and how many keys and pairs there are.

    for operation in attend_operations(layer, workload, length=1, decodes=True): ...

Keys handed to the kernel are those its store gives back: a ring gives all its slots, also those out of the window.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from clearhead.architecture import (
    AttentionPattern,
    Bidirectional,
    Causal,
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
from clearhead.cache import KeyValueCache
from clearhead.costs.formulas.product import Operation, Size, linear
from clearhead.costs.formulas.workload import Workload

AttentionConfig = GroupedAttention | LatentAttention


@dataclass(frozen=True)
class Keys:
    """What the queries of one row look at."""

    num_queries: int
    num_keys: int  # handed to the kernel
    allowed_pairs: int  # of query and key, by the mask

    @property
    def pairs(self) -> int:
        return self.num_queries * self.num_keys


def keys_for(layer: Layer, workload: Workload, length: int, decodes: bool) -> Keys:
    start = workload.context - length if decodes else 0
    pairs = allowed_pairs(layer.attention.pattern, start, length)
    if not decodes or workload.phase == "train":
        return Keys(length, length, pairs)
    return Keys(length, num_slots(layer, workload.config, start, length), pairs)


def num_slots(layer: Layer, config: ModelConfig, start: int, length: int) -> int:
    """That a cache made for this model hands this layer's kernel for `length` tokens after `start` others."""
    assert config.decoder is not None
    store = KeyValueCache(config).stores[config.decoder.layers.index(layer)]
    with torch.device("meta"):  # only their number counts, and a context may be long
        return len(store.slots(start, length))


def allowed_pairs(pattern: AttentionPattern, start: int, length: int) -> int:
    """Σ over the queries at start … start + length - 1 of the keys each may see."""
    end = start + length
    match pattern:
        case Bidirectional():
            return length * end
        case Causal():
            return triangle(end) - triangle(start)
        case SlidingWindow(size=size):
            return windowed(end, size) - windowed(start, size)
        case Chunked(size=size):
            return chunked(end, size) - chunked(start, size)


def triangle(length: int) -> int:
    return length * (length + 1) // 2


def windowed(length: int, size: int) -> int:
    short = min(length, size)
    return triangle(short) + (length - short) * size


def chunked(length: int, size: int) -> int:
    return length // size * triangle(size) + triangle(length % size)


def absorbs(workload: Workload, num_queries: int) -> bool:
    """One query works on the latent itself; see generation/decode.py."""
    return workload.phase != "train" and num_queries == 1


def is_fused(attention: AttentionConfig, workload: Workload, num_queries: int) -> bool:
    """Whether PyTorch's fused kernel computes this attention; otherwise scores are written out.

    The kernel for the CPU takes no dropout and no values of another width, and none gives the gradient of a learned
    bias (seen with torch 2.13). `attend.fused` itself spells out what no kernel can be told.
    """
    training, on_cpu = workload.phase == "train", workload.device_type == "cpu"
    if on_cpu and training and workload.config.dropout.attention:
        return False
    if isinstance(attention, LatentAttention):
        query_width = attention.plain_width + attention.rotary_width
        return not on_cpu or (not absorbs(workload, num_queries) and query_width == attention.value_width)
    if attention.softcap is not None or isinstance(attention.temperature, ScoreTemperature):
        return False
    if training and isinstance(attention.position, RelativeBuckets | RelativeSinusoid):
        return False
    return not on_cpu or attention.value_width in (None, attention.head_width)


def attend_operations(layer: Layer, workload: Workload, length: int, decodes: bool) -> Iterator[Operation]:
    keys = keys_for(layer, workload, length, decodes)
    match layer.attention:
        case GroupedAttention() as attention:
            yield from grouped_operations(attention, workload, keys)
        case LatentAttention() as attention:
            yield from latent_operations(attention, workload, keys)
    if layer.cross_attention is not None:
        across = Keys(length, workload.source, length * workload.source)
        yield from cross_operations(layer.cross_attention, workload, across)


def grouped_operations(attention: GroupedAttention, workload: Workload, keys: Keys) -> Iterator[Operation]:
    tokens, width = Size("B·T", workload.batch * keys.num_queries), Size("D", workload.config.width)
    heads, kv_heads, head = attention.num_heads, attention.num_kv_heads, attention.head_width
    value = attention.value_width or head
    kept = kv_heads * (head + value)
    yield linear("query, key, value", tokens, width, Size("(N + 2K)·H", heads * head + kept))
    if isinstance(attention.position, RelativeSinusoid):
        yield from distance_operations(attention, workload, keys)
    fused = is_fused(attention, workload, keys.num_queries)
    yield from score_operations(fused, heads, head, value, kept, workload, keys)
    yield linear("output", tokens, Size("N·H", heads * value), width)


def cross_operations(attention: GroupedAttention, workload: Workload, keys: Keys) -> Iterator[Operation]:
    """Queries of the decoder, keys and values of the source; a decoded token finds those already made."""
    tokens, width = Size("B·T", workload.batch * keys.num_queries), Size("D", workload.config.width)
    heads, head = attention.num_heads, attention.head_width
    value = attention.value_width or head
    yield linear("cross query", tokens, width, Size("N·H", heads * head))
    if workload.phase == "train":
        yield cross_memory(attention, workload)
    kept = attention.num_kv_heads * (head + value)
    fused = is_fused(attention, workload, keys.num_queries)
    for operation in score_operations(fused, heads, head, value, kept, workload, keys):
        yield replace(operation, name=f"cross {operation.name}")
    yield linear("cross output", tokens, Size("N·H", heads * value), width)


def cross_memory(attention: GroupedAttention, workload: Workload) -> Operation:
    kept = attention.num_kv_heads * (attention.head_width + (attention.value_width or attention.head_width))
    tokens, width = Size("B·S", workload.batch * workload.source), Size("D", workload.config.width)
    return linear("cross key, value", tokens, width, Size("2K·H", kept))


def latent_operations(attention: LatentAttention, workload: Workload, keys: Keys) -> Iterator[Operation]:
    tokens, width = Size("B·T", workload.batch * keys.num_queries), Size("D", workload.config.width)
    heads, plain, value = attention.num_heads, attention.plain_width, attention.value_width
    rank, rotary = attention.latent_rank, attention.rotary_width
    queries = Size("N·(p + r)", heads * (plain + rotary))
    if attention.query_rank is None:
        yield linear("query", tokens, width, queries)
    else:
        yield linear("query down", tokens, width, Size("Rq", attention.query_rank))
        yield linear("query up", tokens, Size("Rq", attention.query_rank), queries)
    yield linear("latent", tokens, width, Size("R + r", rank + rotary))
    fused = is_fused(attention, workload, keys.num_queries)
    if absorbs(workload, keys.num_queries):
        all_heads = Size("B·T·N", tokens.number * heads)
        yield linear("absorb key", all_heads, Size("p", plain), Size("R", rank), heads)
        yield from score_operations(fused, heads, rank + rotary, rank, rank + rotary, workload, keys)
        yield linear("absorb value", all_heads, Size("R", rank), Size("v", value), heads)
    else:
        unfolded = Size("B·S", workload.batch * keys.num_keys)
        yield linear("unfold", unfolded, Size("R", rank), Size("N·(p + v)", heads * (plain + value)))
        kept = heads * (plain + rotary + value)
        yield from score_operations(fused, heads, plain + rotary, value, kept, workload, keys)
    yield linear("output", tokens, Size("N·v", heads * value), width)


def score_operations(
    fused: bool, heads: int, head: int, value: int, kept: int, workload: Workload, keys: Keys
) -> Iterator[Operation]:
    """QKᵀ and AV. A fused backward makes the scores again: three products for the first, two for the second.

    `kept`: numbers of a token's keys and values.
    """
    rows = workload.batch
    pairs, allowed = (2 * rows * heads * number for number in (keys.pairs, keys.allowed_pairs))
    of_key = kept * head // (head + value)
    scores = 0 if fused else rows * heads * keys.pairs
    written = "" if fused else " + B·N·T·S"
    yield Operation(
        name="scores",
        formula="2·B·N·T·S·H",
        traffic=f"B·(T·N + S·K)·H{written}",
        flops=pairs * head,
        allowed_flops=allowed * head,
        inputs=rows * (heads * head * keys.num_queries + of_key * keys.num_keys),
        scores=scores,
        backward=3 if fused else 2,
    )
    yield Operation(
        name="weighted sum",
        formula="2·B·N·T·S·H",
        traffic=f"B·(S·K + T·N)·H{written}",
        flops=pairs * value,
        allowed_flops=allowed * value,
        inputs=rows * (kept - of_key) * keys.num_keys,
        outputs=rows * heads * value * keys.num_queries,
        scores=scores,
    )


def distance_operations(attention: GroupedAttention, workload: Workload, keys: Keys) -> Iterator[Operation]:
    """Transformer-XL: a vector for each of T + S - 1 distances, projected once, and each query with all of them."""
    distances = Size("(T + S)", keys.num_queries + keys.num_keys - 1)
    heads, head = attention.num_heads, attention.head_width
    projection = linear("distances", distances, Size("D", workload.config.width), Size("N·H", heads * head))
    yield replace(projection, backward=1)  # the sinusoids learn nothing
    queries = workload.batch * heads * keys.num_queries
    yield Operation(
        name="distance scores",
        formula="2·B·N·T·(T + S)·H",
        traffic="(B·T + T + S)·N·H + B·N·T·(T + S)",
        flops=2 * queries * distances.number * head,
        inputs=queries * head + heads * distances.number * head,
        outputs=queries * distances.number,
    )
