"""The products of one token on an NVIDIA GPU; what counts is to read every weight once, at the speed of the memory.
The twin of each kernel is the same lines of model/ in PyTorch (tests/backends/cuda/test_triton.py).

    multiply_row[grid](y, x, weight, ...)      y = residual + activation(W norm(x))
    multiply_packed_row[grid](...)             the same from weights in few bits (packed.py)

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
def gelu(x):
    return 0.5 * x * (1 + tl.erf(0.7071067812 * x))


@triton.jit
def moments(x, epsilon, K: tl.constexpr):
    """The mean of x, and 1 / its deviation from a second look: what Σx² leaves of a small one is noise."""
    k = tl.arange(0, 1024)
    sums = tl.zeros((1024,), tl.float32)
    for start in tl.static_range(0, K, 1024):
        sums += tl.load(x + start + k, start + k < K, 0.0).to(tl.float32)
    mean = tl.sum(sums) / K
    squares = tl.zeros((1024,), tl.float32)
    for start in tl.static_range(0, K, 1024):
        away = tl.load(x + start + k, start + k < K, 0.0).to(tl.float32) - mean
        squares += tl.where(start + k < K, away * away, 0.0)
    return mean, tl.rsqrt(tl.sum(squares) / K + epsilon)


@triton.jit
def read_input(
    x, gain, shift, mean, factor, k,
    K: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr,
):  # fmt: skip
    """x at k through the norm, but for the factor of RMS, which `finish` knows; and its squares.

    EVEN: no k lies beyond K.
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
    """From the sums of rows n to y. RMS norm costs no pass of its own: W (x · g) / rms(x), and rms(x) is known now."""
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
    """x (K,), W (N, K), or with GATED (2N, K): the gate's rows and then the up rows; y (N,)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = n < N
    rows = weight + n[:, None].to(tl.int64) * K + k[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    ups = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    within = inside[:, None] if EVEN else inside[:, None] & (k < K)[None, :]
    w = tl.load(rows, within, 0.0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mean, factor = 0.0, 0.0
    if NORM == "layer":
        mean, factor = moments(x, epsilon, K)
    for start in tl.static_range(0, K, BLOCK_K):
        within = inside[:, None] if EVEN else inside[:, None] & (start + k < K)[None, :]
        if start > 0:
            w = tl.load(rows + start, within, 0.0, eviction_policy="evict_first")
        values, squared = read_input(x, gain, shift, mean, factor, start + k, K, EVEN, NORM, UNIT_OFFSET, NORM_BIAS)
        squares += squared
        sums += w.to(tl.float32) * values[None, :]
        if GATED:
            up = tl.load(rows + N.to(tl.int64) * K + start, within, 0.0, eviction_policy="evict_first")
            ups += up.to(tl.float32) * values[None, :]
    finish(
        y, tl.sum(sums, 1), tl.sum(ups, 1), tl.sum(squares), bias, residual, n, N, epsilon,
        K, NORM, GATED, ACTIVATION, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit
def multiply_packed_row(
    y, x, quants, scales, offsets, gain, shift, bias, residual,
    N, epsilon,
    K: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, NORM_BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr, DP4A: tl.constexpr,
):  # fmt: skip
    """As multiply_row, of W in GROUPS groups of 32 to a row: scale · quant + offset, the quants in words of 32 bits.

    x too is rounded to eight bits, with a scale for each group, and the products are those of integers: to convert
    every weight would take longer than to load it. A program does so once, for all of x (BLOCK_G >= GROUPS), and then
    goes from one block of rows to the next, which is on its way before the last is done. Several x (B, K) are one axis
    more of programs, and each reads W anew.
    """
    x += tl.program_id(1) * K
    y += tl.program_id(1) * N
    residual += tl.program_id(1) * N
    group = tl.arange(0, BLOCK_G)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words, scale, offset = load_groups(quants, scales, offsets, n, group, N, GROUPS, BITS, OFFSETS)
    if GATED:
        up_words, up_scale, up_offset = load_groups(quants, scales, offsets, N + n, group, 2 * N, GROUPS, BITS, OFFSETS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mean, factor = 0.0, 0.0
    if NORM == "layer":
        mean, factor = moments(x, epsilon, K)
    # A group's words: of eight bits all 32 quants, of four the first half in `low` and the last in `high`.
    EVEN: tl.constexpr = K == 32 * BLOCK_G
    k = group[:, None, None] * 32 + tl.arange(0, BITS)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    low, squares = read_input(x, gain, shift, mean, factor, k, K, EVEN, NORM, UNIT_OFFSET, NORM_BIAS)
    peak = tl.max(tl.max(tl.abs(low), 2), 1)
    high = low
    if BITS == 4:
        high, more = read_input(x, gain, shift, mean, factor, k + 16, K, EVEN, NORM, UNIT_OFFSET, NORM_BIAS)
        squares += more
        peak = tl.maximum(peak, tl.max(tl.max(tl.abs(high), 2), 1))
    squares = tl.sum(squares)
    finer, coarser = (127 / tl.maximum(peak, 1e-30))[:, None, None], peak / 127
    low, high = four_in_a_word(low * finer), four_in_a_word(high * finer)
    for _ in range(tl.cdiv(N, tl.num_programs(0) * BLOCK_N)):
        following = n + tl.num_programs(0) * BLOCK_N
        next_words, next_scale, next_offset = load_groups(
            quants, scales, offsets, following, group, N, GROUPS, BITS, OFFSETS
        )
        total = dot_groups(words, scale, offset, low, high, coarser, BITS, OFFSETS, DP4A)
        total_up = total
        if GATED:
            total_up = dot_groups(up_words, up_scale, up_offset, low, high, coarser, BITS, OFFSETS, DP4A)
            up_words, up_scale, up_offset = load_groups(
                quants, scales, offsets, N + following, group, 2 * N, GROUPS, BITS, OFFSETS
            )
        finish(
            y, total, total_up, squares, bias, residual, n, N, epsilon,
            K, NORM, GATED, ACTIVATION, BIAS, RESIDUAL,
        )  # fmt: skip
        words, scale, offset, n = next_words, next_scale, next_offset, following


@triton.jit
def load_groups(quants, scales, offsets, n, group, N, GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr):
    """Of rows n < N: their quants (BLOCK_N, BLOCK_G, BITS words), scales and offsets (BLOCK_N, BLOCK_G)."""
    place = n[:, None].to(tl.int64) * GROUPS + group[None, :]
    within = (n < N)[:, None] & (group < GROUPS)[None, :]
    word = place[:, :, None] * BITS + tl.arange(0, BITS)[None, None, :]
    words = tl.load(quants + word, within[:, :, None], 0, eviction_policy="evict_first")
    scale = tl.load(scales + place, within, 0.0)
    return words, scale, tl.load(offsets + place, within, 0.0) if OFFSETS else scale


@triton.jit
def four_in_a_word(values):
    """(..., 4) numbers from -127 to 127, rounded to bytes -> (...) words."""
    return tl.sum((tl.floor(values + 0.5).to(tl.int32) & 255) << (tl.arange(0, 4) * 8)[None, None, :], 2)


@triton.jit
def dot_groups(
    words, scale, offset, low, high, coarser, BITS: tl.constexpr, OFFSETS: tl.constexpr, DP4A: tl.constexpr
):  # fmt: skip
    """Rows of W times x: `low` and `high` (BLOCK_G, BITS) are its words and `coarser` (BLOCK_G,) their scales."""
    if BITS == 8:
        return tl.sum(tl.sum(dot4(words, low[None, :, :], 0, DP4A), 2) * scale.to(tl.float32) * coarser[None, :], 1)
    # Byte j of a group holds its quants j and j + 16.
    first, last = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    sums = tl.sum(dot4(first, low[None, :, :], dot4(last, high[None, :, :], 0, DP4A), DP4A), 2).to(tl.float32)
    ones = tl.full((1, 1), 0x01010101, tl.int32)
    whole = tl.sum(dot4(low, ones, dot4(high, ones, 0, DP4A), DP4A), 1).to(tl.float32)[None, :]
    if OFFSETS:
        sums = sums * scale.to(tl.float32) + whole * offset.to(tl.float32)
    else:
        sums = (sums - 8 * whole) * scale.to(tl.float32)
    return tl.sum(sums * coarser[None, :], 1)


@triton.jit
def dot4(a, b, c, DP4A: tl.constexpr):
    """c + Σ a_i b_i over the four signed bytes of each word: one instruction of a GPU, which the interpreter lacks."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    for byte in tl.static_range(4):
        c += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return c
