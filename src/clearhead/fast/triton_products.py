"""One token through a decoder layer on an NVIDIA GPU, in five kernels; what counts is to read every weight once, at the
speed of the memory. The twin of each is the same lines of model/ in PyTorch (tests/fast/test_triton_kernels.py).

    multiply_row[grid](y, x, weight, ...)      y = residual + activation(W norm(x))
    attend_row[grid](...)                      rotate, keep, softmax(q K) V over the slots in use

With PDL (programmatic dependent launch, Hopper and later) a kernel starts while the one before still runs: it fetches
its first weights, which nobody writes, and only then waits.
"""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    return x - x / (1 + tl.exp(1.5957691216 * (x + 0.044715 * x * x * x)))


@triton.jit
def multiply_row(
    y, x, weight, scales, norm_weight, bias, residual,
    N, epsilon,
    K: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    QUANTISED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr = 0,
):  # fmt: skip
    """x (K,), W (N, K), or with GATED (2N, K): the gate's rows and then the up rows; y (N,).

    RMS norm costs no pass of its own: W (x · g) / rms(x), and rms(x) is known when the sum is.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    rows = weight + n[:, None].to(tl.int64) * K + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    within = inside[:, None] if EVEN else inside[:, None] & (k < K)[None, :]
    if STAGES == 0:
        w = tl.load(rows, within, 0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if STAGES == 0:
        for start in tl.static_range(0, K, BLOCK_K):
            within = inside[:, None] if EVEN else inside[:, None] & (start + k < K)[None, :]
            if start > 0:
                w = tl.load(rows + start, within, 0.0, eviction_policy="evict_first")
            values = tl.load(x + start + k, None if EVEN else start + k < K, None if EVEN else 0.0).to(tl.float32)
            if NORM:
                squares += values * values
                gain = tl.load(norm_weight + start + k, None if EVEN else start + k < K, None if EVEN else 0.0)
                values *= gain.to(tl.float32) + 1 if UNIT_OFFSET else gain.to(tl.float32)
            sums += w.to(tl.float32) * values[None, :]
            if GATED:
                up = tl.load(rows + N.to(tl.int64) * K + start, within, 0.0, eviction_policy="evict_first")
                ups += up.to(tl.float32) * values[None, :]
    else:
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            within = inside[:, None] if EVEN else inside[:, None] & (start + k < K)[None, :]
            w = tl.load(rows + start, within, 0.0, eviction_policy="evict_first")
            if GATED:
                up = tl.load(rows + N.to(tl.int64) * K + start, within, 0.0, eviction_policy="evict_first")
            values = tl.load(x + start + k, None if EVEN else start + k < K, None if EVEN else 0.0).to(tl.float32)
            if NORM:
                squares += values * values
                gain = tl.load(norm_weight + start + k, None if EVEN else start + k < K, None if EVEN else 0.0)
                values *= gain.to(tl.float32) + 1 if UNIT_OFFSET else gain.to(tl.float32)
            sums += w.to(tl.float32) * values[None, :]
            if GATED:
                ups += up.to(tl.float32) * values[None, :]
    total = tl.sum(sums, 1)
    total_up = tl.sum(ups, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + epsilon)
        total *= factor
        total_up *= factor
    if QUANTISED:
        total *= tl.load(scales + n, inside, 0.0).to(tl.float32)
        if GATED:
            total_up *= tl.load(scales + N + n, inside, 0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + n, inside, 0.0).to(tl.float32)
        if GATED:
            total_up += tl.load(bias + N + n, inside, 0.0).to(tl.float32)
    if ACTIVATION == "silu":
        total = silu(total)
    if ACTIVATION == "gelu_tanh":
        total = gelu_tanh(total)
    if ACTIVATION == "relu":
        total = tl.maximum(total, 0.0)
    if GATED:
        total *= total_up
    if RESIDUAL:
        total += tl.load(residual + n, inside, 0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), inside)


@triton.jit
def turn(heads, cosine, sine, position, PAIRS: tl.constexpr, H: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Heads with their position: pointers (rows, 1) -> (rows, H), each entry its own · cos ± its partner · sin."""
    h = tl.arange(0, H)
    own = tl.load(heads + h[None, :]).to(tl.float32)
    if PAIRS == 0:
        return own
    pair = (h // 2) if NEIGHBOURS else h % PAIRS
    partner = (h ^ 1) if NEIGHBOURS else tl.where(h < PAIRS, h + PAIRS, h - PAIRS)
    first = (h % 2 == 0) if NEIGHBOURS else h < PAIRS
    rotates = h < 2 * PAIRS
    other = tl.load(heads + tl.where(rotates, partner, h)[None, :]).to(tl.float32)
    c = tl.load(cosine + position * PAIRS + pair, rotates, 1.0)
    s = tl.load(sine + position * PAIRS + pair, rotates, 0.0)
    return own * c[None, :] + tl.where(first, -1.0, 1.0)[None, :] * other * s[None, :]


@triton.jit
def attend_row(
    y, states, arrivals, projected, keys, values, positions, cosine, sine,
    row_stride, head_stride, scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, NEIGHBOURS: tl.constexpr,
    GROUP: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One key-value head of one row over one span of its slots; the last span to arrive joins them all.

    projected (B, (N + 2K) H): queries, keys, values side by side. keys, values (B, K, capacity, H). positions (B,):
    the new token's, which is also its slot. GROUP: query heads of a key-value head, filled up to 16 for tl.dot.
    """
    b, head, span = tl.program_id(0) // K, tl.program_id(0) % K, tl.program_id(1)
    h, g = tl.arange(0, H), tl.arange(0, GROUP)
    PER_HEAD: tl.constexpr = N // K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + b)
    length = position + 1
    share = tl.cdiv(tl.cdiv(length, SPANS), BLOCK) * BLOCK
    first, last = span * share, tl.minimum((span + 1) * share, length)
    row = projected + b * (N + 2 * K) * H
    place = b.to(tl.int64) * row_stride + head * head_stride
    if (first <= position) & (position < last):
        one = tl.zeros((1, 1), tl.int32)
        new = turn(row + (N + head) * H + one, cosine, sine, position, PAIRS, H, NEIGHBOURS)
        tl.store(keys + place + position * H + one + h[None, :], new.to(keys.dtype.element_ty))
        tl.store(values + place + position * H + h, tl.load(row + (N + K + head) * H + h))
        tl.debug_barrier()
    # The queries of this head as a (GROUP, H) tile; rows past PER_HEAD repeat the last and are never stored.
    n = head * PER_HEAD + tl.minimum(g, PER_HEAD - 1)
    q = turn(row + n[:, None] * H, cosine, sine, position, PAIRS, H, NEIGHBOURS) * scale
    largest = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, H), tl.float32)
    for start in range(first, last, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = slot < last
        k = tl.load(keys + place + slot[:, None] * H + h[None, :], seen[:, None], 0.0)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee").to(tl.float32)
        scores = tl.where(seen[None, :], scores, -1e30)
        highest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        fade = tl.exp(largest - highest)
        v = tl.load(values + place + slot[:, None] * H + h[None, :], seen[:, None], 0.0)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        largest = highest
    if SPANS == 1:
        out = y + (b * N + n[:, None]) * H + h[None, :]
        tl.store(out, (mixed / total[:, None]).to(y.dtype.element_ty), (g < PER_HEAD)[:, None])
        return
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
