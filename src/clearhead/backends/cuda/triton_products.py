"""Triton kernels for the products of one token, which are limited by the memory: each reads every weight once.

    multiply_row[grid](y, x, weight, ...)      y = residual + activation(W norm(x))
    multiply_packed_row[grid](...)             the same for packed weights (packed/formats.py)

Each kernel is tested against the same formula in PyTorch (tests/backends/cuda/test_triton.py).

With PDL (programmatic dependent launch, Hopper and later) a kernel starts while the previous one still runs: it loads
its first weights, which no kernel writes, and only then waits.
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_groups import dot_groups, load_groups, pack_bytes


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    return x - x / (1 + tl.exp(1.5957691216 * (x + 0.044715 * x * x * x)))


@triton.jit
def gelu(x):
    return 0.5 * x * (1 + tl.erf(0.7071067812 * x))


@triton.jit
def moments(x, epsilon, K: tl.constexpr):
    """Return the mean of x and 1 / its standard deviation, in two passes: Σx² would round a small one away."""
    k = tl.arange(0, 1024)
    sums = tl.zeros((1024,), tl.float32)
    for start in tl.static_range(0, K, 1024):
        sums += tl.load(x + start + k, start + k < K, 0.0).to(tl.float32)
    mean = tl.sum(sums) / K
    squares = tl.zeros((1024,), tl.float32)
    for start in tl.static_range(0, K, 1024):
        deviation = tl.load(x + start + k, start + k < K, 0.0).to(tl.float32) - mean
        squares += tl.where(start + k < K, deviation * deviation, 0.0)
    return mean, tl.rsqrt(tl.sum(squares) / K + epsilon)


@triton.jit
def _read_input(
    x, gain, shift, mean, factor, k,
    K: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr,
):  # fmt: skip
    """Load x at k, apply the norm except for the RMS factor, which `finish` applies; also return the squares of x.

    EVEN: no k is beyond K.
    """
    values = tl.load(x + k, None if EVEN else k < K, None if EVEN else 0.0).to(tl.float32)
    squares = values * values
    if NORM == "layer":
        values = (values - mean) * factor
    if NORM != "":
        scale = tl.load(gain + k, None if EVEN else k < K, None if EVEN else 0.0).to(tl.float32)
        values *= scale + 1 if UNIT_OFFSET else scale
    if NORM_BIAS:
        values += tl.load(shift + k, None if EVEN else k < K, None if EVEN else 0.0).to(tl.float32)
    return values, squares


@triton.jit
def finish(
    y, total, total_up, squares, bias, residual, n, N, epsilon,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Turn the sums of rows n into y. RMS norm needs no extra pass: y = W (x · gain) / rms(x), with rms(x) at hand."""
    inside = n < N
    if NORM == "rms":
        factor = tl.rsqrt(squares / K + epsilon)
        total *= factor
        total_up *= factor
    if BIAS:
        total += tl.load(bias + n, inside, 0.0).to(tl.float32)
        if GATED:
            total_up += tl.load(bias + N + n, inside, 0.0).to(tl.float32)
    if ACTIVATION == "silu":
        total = silu(total)
    if ACTIVATION == "gelu":
        total = gelu(total)
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
def multiply_row(
    y, x, weight, gain, shift, bias, residual,
    N, epsilon,
    K: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (N,) from x (K,) and W (N, K), or with GATED W (2N, K): the rows of the gate, then those of up."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    rows = weight + n[:, None].to(tl.int64) * K + k[None, :]
    up_rows = rows + N.to(tl.int64) * K
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    w, up = _load_tile(rows, up_rows, inside, k, 0, K, EVEN, GATED)
    second, second_up = w, up
    if K > BLOCK_K:
        second, second_up = _load_tile(rows, up_rows, inside, k, BLOCK_K, K, EVEN, GATED)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mean, factor = 0.0, 0.0
    if NORM == "layer":
        mean, factor = moments(x, epsilon, K)
    for start in tl.static_range(0, K, BLOCK_K):
        if start == BLOCK_K:
            w, up = second, second_up
        if start > BLOCK_K:
            w, up = _load_tile(rows, up_rows, inside, k, start, K, EVEN, GATED)
        values, squared = _read_input(x, gain, shift, mean, factor, start + k, K, EVEN, NORM, UNIT_OFFSET, NORM_BIAS)
        squares += squared
        sums += w.to(tl.float32) * values[None, :]
        if GATED:
            ups += up.to(tl.float32) * values[None, :]
    finish(
        y, tl.sum(sums, 1), tl.sum(ups, 1), tl.sum(squares), bias, residual, n, N, epsilon,
        K, NORM, GATED, ACTIVATION, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit
def _load_tile(rows, up_rows, inside, k, start, K: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr):
    """Load the columns from `start` on of rows of W and, if GATED, of those of up; otherwise the former twice."""
    within = inside[:, None] if EVEN else inside[:, None] & (start + k < K)[None, :]
    w = tl.load(rows + start, within, 0.0, eviction_policy="evict_first")
    return w, tl.load(up_rows + start, within, 0.0, eviction_policy="evict_first") if GATED else w


@triton.jit
def multiply_packed_row(
    y, x, quants, scales, offsets, group_scales, group_offsets, gain, shift, bias, residual,
    N, epsilon,
    K: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr, DP4A: tl.constexpr,
):  # fmt: skip
    """Compute as multiply_row with a packed W: GROUPS groups of 32 per row, scale · quant + offset, in 32-bit words.

    x is also rounded to eight bits, with a scale per group, and the products are those of integers: converting every
    weight would take longer than loading it. A program rounds all of x once (BLOCK_G >= GROUPS) and then goes from one
    block of rows to the next, which is loaded before the previous one is finished. For several x (B, K) the grid has a
    second axis, and each x reads W again. The constants of the format: triton_groups.py.
    """
    x += tl.program_id(1) * K
    y += tl.program_id(1) * N
    residual += tl.program_id(1) * N
    group = tl.arange(0, BLOCK_G)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words, scale, late_scale, offset, late_offset = load_groups(
        quants, scales, offsets, group_scales, group_offsets, n, group, N, GROUPS, BITS, OFFSETS, LEVELS
    )
    if GATED:
        up_words, up_scale, late_up_scale, up_offset, late_up_offset = load_groups(
            quants, scales, offsets, group_scales, group_offsets, N + n, group, 2 * N, GROUPS, BITS, OFFSETS, LEVELS
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mean, factor = 0.0, 0.0
    if NORM == "layer":
        mean, factor = moments(x, epsilon, K)
    # Words of a group: `low` holds all 32 quants of 8 bits, or the first 16 of 4 bits; `high` then holds the others.
    EVEN: tl.constexpr = K == 32 * BLOCK_G
    k = group[:, None, None] * 32 + tl.arange(0, BITS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    low, squares = _read_input(x, gain, shift, mean, factor, k, K, EVEN, NORM, UNIT_OFFSET, NORM_BIAS)
    largest = tl.max(tl.max(tl.abs(low), 2), 1)
    high = low
    if BITS == 4:
        high, more = _read_input(x, gain, shift, mean, factor, k + 16, K, EVEN, NORM, UNIT_OFFSET, NORM_BIAS)
        squares += more
        largest = tl.maximum(largest, tl.max(tl.max(tl.abs(high), 2), 1))
    squares = tl.sum(squares)
    inverse_scale, x_scale = (127 / tl.maximum(largest, 1e-30))[:, None, None], largest / 127
    low, high = pack_bytes(low * inverse_scale), pack_bytes(high * inverse_scale)
    for _ in range(tl.cdiv(N, tl.num_programs(0) * BLOCK_N)):
        next_n = n + tl.num_programs(0) * BLOCK_N
        next_words, next_scale, late_next_scale, next_offset, late_next_offset = load_groups(
            quants, scales, offsets, group_scales, group_offsets, next_n, group, N, GROUPS, BITS, OFFSETS, LEVELS
        )
        total = dot_groups(
            words, scale, late_scale, offset, late_offset, low, high, x_scale, BITS, OFFSETS, LEVELS, DP4A
        )
        total_up = total
        if GATED:
            total_up = dot_groups(
                up_words, up_scale, late_up_scale, up_offset, late_up_offset, low, high, x_scale, BITS, OFFSETS, LEVELS,
                DP4A,
            )  # fmt: skip
            up_words, up_scale, late_up_scale, up_offset, late_up_offset = load_groups(
                quants, scales, offsets, group_scales, group_offsets, N + next_n, group, 2 * N, GROUPS, BITS, OFFSETS,
                LEVELS,
            )  # fmt: skip
        finish(
            y, total, total_up, squares, bias, residual, n, N, epsilon,
            K, NORM, GATED, ACTIVATION, BIAS, RESIDUAL,
        )  # fmt: skip
        words, scale, late_scale, n = next_words, next_scale, late_next_scale, next_n
        offset, late_offset = next_offset, late_next_offset
