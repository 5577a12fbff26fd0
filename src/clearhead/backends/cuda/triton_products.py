"""Triton kernels for the products of one token, which are limited by the memory: each reads every weight once.

    multiply_row[grid](y, x, weight, ...)      y = residual + activation(W norm(x))
    multiply_packed_row[grid](...)             the same for packed weights (packed/formats.py)

Each kernel is tested against the same formula in PyTorch (tests/backends/cuda/test_triton.py).

With PDL (programmatic dependent launch, Hopper and later) a kernel starts while the previous one still runs: it loads
its first weights, which no kernel writes, and only then waits.
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

    With two LEVELS, scale and offset are products of those of a block of 256 values and integers of a group, or in 8
    bits of each half of a group (packed/wide_formats.py).

    x is also rounded to eight bits, with a scale per group, and the products are those of integers: converting every
    weight would take longer than loading it. A program rounds all of x once (BLOCK_G >= GROUPS) and then goes from one
    block of rows to the next, which is loaded before the previous one is finished. For several x (B, K) the grid has a
    second axis, and each x reads W again.
    """
    x += tl.program_id(1) * K
    y += tl.program_id(1) * N
    residual += tl.program_id(1) * N
    group = tl.arange(0, BLOCK_G)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words, scale, late_scale, offset = load_groups(
        quants, scales, offsets, group_scales, group_offsets, n, group, N, GROUPS, BITS, OFFSETS, LEVELS
    )
    if GATED:
        up_words, up_scale, late_up_scale, up_offset = load_groups(
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
    low, high = _pack_bytes(low * inverse_scale), _pack_bytes(high * inverse_scale)
    for _ in range(tl.cdiv(N, tl.num_programs(0) * BLOCK_N)):
        next_n = n + tl.num_programs(0) * BLOCK_N
        next_words, next_scale, late_next_scale, next_offset = load_groups(
            quants, scales, offsets, group_scales, group_offsets, next_n, group, N, GROUPS, BITS, OFFSETS, LEVELS
        )
        total = _dot_groups(words, scale, late_scale, offset, low, high, x_scale, BITS, OFFSETS, LEVELS, DP4A)
        total_up = total
        if GATED:
            total_up = _dot_groups(
                up_words, up_scale, late_up_scale, up_offset, low, high, x_scale, BITS, OFFSETS, LEVELS, DP4A
            )
            up_words, up_scale, late_up_scale, up_offset = load_groups(
                quants, scales, offsets, group_scales, group_offsets, N + next_n, group, 2 * N, GROUPS, BITS, OFFSETS,
                LEVELS,
            )  # fmt: skip
        finish(
            y, total, total_up, squares, bias, residual, n, N, epsilon,
            K, NORM, GATED, ACTIVATION, BIAS, RESIDUAL,
        )  # fmt: skip
        words, scale, late_scale, offset, n = next_words, next_scale, late_next_scale, next_offset, next_n


@triton.jit
def load_groups(
    quants, scales, offsets, group_scales, group_offsets, n, group, N,
    GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Load rows n < N: quants (BLOCK_N, BLOCK_G, BITS words), scales of both halves of a group, and its offsets."""
    place = n[:, None].to(tl.int64) * GROUPS + group[None, :]
    within = (n < N)[:, None] & (group < GROUPS)[None, :]
    word = place[:, :, None] * BITS + tl.arange(0, BITS)[None, None, :]
    words = tl.load(quants + word, within[:, :, None], 0, eviction_policy="evict_first")
    # Only one return: Triton also compiles what follows an early one.
    if LEVELS == 1:
        scale = tl.load(scales + place, within, 0.0)
        late_scale = scale
        offset = tl.load(offsets + place, within, 0.0) if OFFSETS else scale
    else:
        block = n[:, None].to(tl.int64) * (GROUPS // 8) + (group // 8)[None, :]
        block_scale = tl.load(scales + block, within, 0.0).to(tl.float32)
        if BITS == 4:
            scale = block_scale * tl.load(group_scales + place, within, 0).to(tl.float32)
            late_scale = scale
        else:
            scale = block_scale * tl.load(group_scales + 2 * place, within, 0).to(tl.float32)
            late_scale = block_scale * tl.load(group_scales + 2 * place + 1, within, 0).to(tl.float32)
        offset = scale
        if OFFSETS:
            offset = tl.load(offsets + block, within, 0.0).to(tl.float32)
            offset *= tl.load(group_offsets + place, within, 0).to(tl.float32)
    return words, scale, late_scale, offset


@triton.jit
def _pack_bytes(values):
    """Round values (..., 4) from -127 to 127 to bytes and pack them into words (...)."""
    return tl.sum((tl.floor(values + 0.5).to(tl.int32) & 255) << (tl.arange(0, 4) * 8)[None, None, :], 2)


@triton.jit
def _dot_groups(
    words, scale, late_scale, offset, low, high, x_scale,
    BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr, DP4A: tl.constexpr,
):  # fmt: skip
    """Multiply rows of W with x, given as words `low` and `high` (BLOCK_G, BITS) and scales `x_scale` (BLOCK_G,)."""
    if BITS == 8:
        dots = _dot4(words, low[None, :, :], 0, DP4A)
        sums = tl.sum(dots, 2).to(tl.float32)
        if LEVELS == 2:
            is_first = (tl.arange(0, 8) < 4)[None, None, :]
            first = tl.sum(tl.where(is_first, dots, 0), 2).to(tl.float32)
            sums = first * scale + (sums - first) * late_scale
        else:
            sums *= scale.to(tl.float32)
        if OFFSETS:
            ones = tl.full((1, 1), 0x01010101, tl.int32)
            sums += tl.sum(_dot4(low, ones, 0, DP4A), 1).to(tl.float32)[None, :] * offset.to(tl.float32)
        return tl.sum(sums * x_scale[None, :], 1)
    # Byte j of a group holds its quants j and j + 16.
    first, last = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    sums = tl.sum(_dot4(first, low[None, :, :], _dot4(last, high[None, :, :], 0, DP4A), DP4A), 2).to(tl.float32)
    ones = tl.full((1, 1), 0x01010101, tl.int32)
    x_sum = tl.sum(_dot4(low, ones, _dot4(high, ones, 0, DP4A), DP4A), 1).to(tl.float32)[None, :]
    if OFFSETS:
        sums = sums * scale.to(tl.float32) + x_sum * offset.to(tl.float32)
    else:
        sums = (sums - 8 * x_sum) * scale.to(tl.float32)
    return tl.sum(sums * x_scale[None, :], 1)


@triton.jit
def _dot4(a, b, c, DP4A: tl.constexpr):
    """Return c + Σ a_i b_i over the four signed bytes of a word: one GPU instruction, which the interpreter lacks."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    for byte in tl.static_range(4):
        c += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return c
