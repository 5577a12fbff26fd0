"""A Triton kernel for the attention of one new token over the cache, reading only the slots in use.

    attend_row[grid](...)      rotate query and key, store key and value, softmax(q Kᵀ) V

Several programs divide the slots of a head (Flash-Decoding), so that a batch of one keeps all multiprocessors busy. The
reference is `reference_attention` of model/attend.py (tests/backends/cuda/test_triton.py).
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_heads import norm_and_rotate


@triton.jit
def attend_row(
    y, states, num_finished, projected, keys, values, positions, cosine, sine, query_norm, key_norm,
    row_stride, head_stride, window, scale, epsilon,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with one key-value head of one sequence over one span of its slots; the last program joins all spans.

    projected (B, (N + 2K) H): queries, keys and values side by side. keys, values (B, K, capacity, H). positions (B,):
    of the new token, which is also its slot. window: number of tokens to attend to, including the new one.
    query_norm, key_norm (H,): only if NORMED. GROUP: query heads per key-value head, padded to 16 for tl.dot.
    """
    b, head, span = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    h, g = tl.arange(0, H), tl.arange(0, GROUP)
    PER_HEAD: tl.constexpr = N // K
    # The previous kernel writes none of this: the position and the past were complete when the step began.
    position = tl.load(positions + b)
    oldest = tl.maximum(position + 1 - window, 0)
    length = position + 1 - oldest
    span_length = tl.cdiv(tl.cdiv(length, SPANS), BLOCK) * BLOCK
    first, last = oldest + span * span_length, tl.minimum(oldest + (span + 1) * span_length, position)
    head_start = b.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    slot = first + tl.arange(0, BLOCK)
    tile = head_start + slot[:, None] * H + h[None, :]
    k = tl.load(keys + tile, (slot < last)[:, None], 0.0)
    v = tl.load(values + tile, (slot < last)[:, None], 0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The queries of this head as a (GROUP, H) tile; rows beyond PER_HEAD repeat the last one and are never stored.
    row = projected + b * (N + 2 * K) * H
    n = head * PER_HEAD + tl.minimum(g, PER_HEAD - 1)
    q = row + n[:, None] * H
    q = norm_and_rotate(q, query_norm, epsilon, cosine, sine, position, PAIRS, H, H, INTERLEAVED, NORMED, UNIT_OFFSET)
    q *= scale
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    output = tl.zeros((GROUP, H), tl.float32)
    if (first <= position) & (position < first + span_length):  # this span stores the new token and attends to it
        origin = tl.zeros((1, 1), tl.int32)
        new_key = row + (N + head) * H + origin
        new_key = norm_and_rotate(
            new_key, key_norm, epsilon, cosine, sine, position, PAIRS, H, H, INTERLEAVED, NORMED, UNIT_OFFSET
        )
        new_key = new_key.to(keys.dtype.element_ty)
        new_value = tl.load(row + (N + K + head) * H + origin + h[None, :]).to(values.dtype.element_ty)
        tl.store(keys + head_start + position * H + origin + h[None, :], new_key)
        tl.store(values + head_start + position * H + origin + h[None, :], new_value)
        largest = tl.sum(q.to(keys.dtype.element_ty).to(tl.float32) * new_key.to(tl.float32), 1)
        total += 1.0
        output += new_value.to(tl.float32)
    for start in range(first, last, BLOCK):
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee").to(tl.float32)
        scores = tl.where((start + tl.arange(0, BLOCK) < last)[None, :], scores, -1e30)
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        rescale = tl.exp(largest - highest)
        output = output * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        largest = highest
        slot += BLOCK
        tile += BLOCK * H
        k = tl.load(keys + tile, (slot < last)[:, None], 0.0)
        v = tl.load(values + tile, (slot < last)[:, None], 0.0)
    if SPANS == 1:
        target = y + (b * N + n[:, None]) * H + h[None, :]
        tl.store(target, (output / total[:, None]).to(y.dtype.element_ty), (g < PER_HEAD)[:, None])
    else:
        WIDTH: tl.constexpr = H + 2
        state = states + ((tl.program_id(0) * SPANS + span) * GROUP + g) * WIDTH
        tl.store(state, largest, g < PER_HEAD)
        tl.store(state + 1, total, g < PER_HEAD)
        tl.store(state[:, None] + 2 + h[None, :], output, (g < PER_HEAD)[:, None])
        tl.debug_barrier()
        num_before = tl.atomic_add(num_finished + tl.program_id(0), 1, sem="acq_rel")
        if num_before == SPANS - 1:
            tl.store(num_finished + tl.program_id(0), 0)
            _join_spans(y, states, b, n, g, tl.cdiv(length, span_length), N, H, GROUP, SPANS, PER_HEAD)


@triton.jit
def _join_spans(
    y, states, b, n, g, num_used,
    N: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Join the spans' outputs, weighted by their sums (the second half of Flash-Decoding).

    The loop is unrolled, so that all loads are in flight at once.
    """
    h, is_real = tl.arange(0, H), g < PER_HEAD
    WIDTH: tl.constexpr = H + 2
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    output = tl.zeros((GROUP, H), tl.float32)
    for span in tl.static_range(SPANS):
        part = states + ((tl.program_id(0) * SPANS + span) * GROUP + g) * WIDTH
        used = g < tl.where(num_used > span, PER_HEAD, 0)
        part_largest = tl.load(part, used, -1e30, cache_modifier=".cg")
        part_total = tl.load(part + 1, used, 0.0, cache_modifier=".cg")
        part_output = tl.load(part[:, None] + 2 + h[None, :], used[:, None], 0.0, cache_modifier=".cg")
        highest = tl.maximum(largest, part_largest)
        rescale, weight = tl.exp(largest - highest), tl.exp(part_largest - highest)
        output = output * rescale[:, None] + part_output * weight[:, None]
        total = total * rescale + part_total * weight
        largest = highest
    target = y + (b * N + n[:, None]) * H + h[None, :]
    total = tl.where(is_real, total, 1.0)
    tl.store(target, (output / total[:, None]).to(y.dtype.element_ty), is_real[:, None])
