"""Attention of one new token on an NVIDIA GPU, over the slots of the cache that are in use, in one kernel.

    attend_row[grid](...)      rotate, keep, softmax(q K) V

Many programs share a head's slots (Flash-Decoding), so that all multiprocessors take part in a batch of one. Its twin
is model/attend.py's `reference` (tests/backends/cuda/test_triton.py).
"""

import triton
import triton.language as tl


@triton.jit
def turn(
    heads, norm, epsilon, cosine, sine, position,
    PAIRS: tl.constexpr, H: tl.constexpr, NEIGHBOURS: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Heads with their norm and position: pointers (rows, 1) -> (rows, H), each its own · cos ± its partner · sin."""
    h = tl.arange(0, H)
    own = tl.load(heads + h[None, :]).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(own * own, 1) / H + epsilon)[:, None]
        own *= factor * (tl.load(norm + h)[None, :].to(tl.float32) + UNIT_OFFSET)
    if PAIRS == 0:
        return own
    pair = (h // 2) if NEIGHBOURS else h % PAIRS
    partner = (h ^ 1) if NEIGHBOURS else tl.where(h < PAIRS, h + PAIRS, h - PAIRS)
    first = (h % 2 == 0) if NEIGHBOURS else h < PAIRS
    rotates = h < 2 * PAIRS
    partner = tl.where(rotates, partner, h)
    other = tl.load(heads + partner[None, :]).to(tl.float32)
    if NORMED:
        other *= factor * (tl.load(norm + partner)[None, :].to(tl.float32) + UNIT_OFFSET)
    c = tl.load(cosine + position * PAIRS + pair, rotates, 1.0)
    s = tl.load(sine + position * PAIRS + pair, rotates, 0.0)
    return own * c[None, :] + tl.where(first, -1.0, 1.0)[None, :] * other * s[None, :]


@triton.jit
def attend_row(
    y, states, arrivals, projected, keys, values, positions, cosine, sine, query_norm, key_norm,
    row_stride, head_stride, window, scale, epsilon,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    GROUP: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One key-value head of one row over one span of its slots; the last span to arrive joins them all.

    projected (B, (N + 2K) H): queries, keys, values side by side. keys, values (B, K, capacity, H). positions (B,):
    the new token's, which is also its slot. window: tokens that are seen, itself among them. query_norm, key_norm (H,)
    where NORMED. GROUP: query heads of a key-value head, filled up to 16 for tl.dot.
    """
    b, head, span = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    h, g = tl.arange(0, H), tl.arange(0, GROUP)
    PER_HEAD: tl.constexpr = N // K
    # Nothing of this is written by the kernel before: position and past were there when the step began.
    position = tl.load(positions + b)
    oldest = tl.maximum(position + 1 - window, 0)
    length = position + 1 - oldest
    share = tl.cdiv(tl.cdiv(length, SPANS), BLOCK) * BLOCK
    first, last = oldest + span * share, tl.minimum(oldest + (span + 1) * share, position)
    place = b.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    slot = first + tl.arange(0, BLOCK)
    tile = place + slot[:, None] * H + h[None, :]
    k = tl.load(keys + tile, (slot < last)[:, None], 0.0)
    v = tl.load(values + tile, (slot < last)[:, None], 0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # The queries of this head as a (GROUP, H) tile; rows past PER_HEAD repeat the last and are never stored.
    row = projected + b * (N + 2 * K) * H
    n = head * PER_HEAD + tl.minimum(g, PER_HEAD - 1)
    q = row + n[:, None] * H
    q = turn(q, query_norm, epsilon, cosine, sine, position, PAIRS, H, NEIGHBOURS, NORMED, UNIT_OFFSET) * scale
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, H), tl.float32)
    if (first <= position) & (position < first + share):  # the new token, which is kept and seen here
        one = tl.zeros((1, 1), tl.int32)
        new = row + (N + head) * H + one
        new = turn(new, key_norm, epsilon, cosine, sine, position, PAIRS, H, NEIGHBOURS, NORMED, UNIT_OFFSET)
        new = new.to(keys.dtype.element_ty)
        value = tl.load(row + (N + K + head) * H + one + h[None, :]).to(values.dtype.element_ty)
        tl.store(keys + place + position * H + one + h[None, :], new)
        tl.store(values + place + position * H + one + h[None, :], value)
        largest = tl.sum(q.to(keys.dtype.element_ty).to(tl.float32) * new.to(tl.float32), 1)
        total += 1.0
        mixed += value.to(tl.float32)
    for start in range(first, last, BLOCK):
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee").to(tl.float32)
        scores = tl.where((start + tl.arange(0, BLOCK) < last)[None, :], scores, -1e30)
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        fade = tl.exp(largest - highest)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        largest = highest
        slot += BLOCK
        tile += BLOCK * H
        k = tl.load(keys + tile, (slot < last)[:, None], 0.0)
        v = tl.load(values + tile, (slot < last)[:, None], 0.0)
    if SPANS == 1:
        out = y + (b * N + n[:, None]) * H + h[None, :]
        tl.store(out, (mixed / total[:, None]).to(y.dtype.element_ty), (g < PER_HEAD)[:, None])
    else:
        WIDTH: tl.constexpr = H + 2
        mine = states + ((tl.program_id(0) * SPANS + span) * GROUP + g) * WIDTH
        tl.store(mine, largest, g < PER_HEAD)
        tl.store(mine + 1, total, g < PER_HEAD)
        tl.store(mine[:, None] + 2 + h[None, :], mixed, (g < PER_HEAD)[:, None])
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPANS - 1:
            tl.store(arrivals + tl.program_id(0), 0)
            join_spans(y, states, b, n, g, tl.cdiv(length, share), N, H, GROUP, SPANS, PER_HEAD)


@triton.jit
def join_spans(
    y, states, b, n, g, num_used,
    N: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SPANS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Flash-Decoding's second half: outputs of the spans, weighted by their own sums. Unrolled: all loads at once."""
    h, real = tl.arange(0, H), g < PER_HEAD
    WIDTH: tl.constexpr = H + 2
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, H), tl.float32)
    for span in tl.static_range(SPANS):
        part = states + ((tl.program_id(0) * SPANS + span) * GROUP + g) * WIDTH
        used = g < tl.where(num_used > span, PER_HEAD, 0)
        peak = tl.load(part, used, -1e30, cache_modifier=".cg")
        share = tl.load(part + 1, used, 0.0, cache_modifier=".cg")
        there = tl.load(part[:, None] + 2 + h[None, :], used[:, None], 0.0, cache_modifier=".cg")
        highest = tl.maximum(largest, peak)
        fade, weight = tl.exp(largest - highest), tl.exp(peak - highest)
        mixed = mixed * fade[:, None] + there * weight[:, None]
        total = total * fade + share * weight
        largest = highest
    out = y + (b * N + n[:, None]) * H + h[None, :]
    total = tl.where(real, total, 1.0)
    tl.store(out, (mixed / total[:, None]).to(y.dtype.element_ty), real[:, None])
