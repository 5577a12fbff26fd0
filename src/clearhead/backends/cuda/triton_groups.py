"""Triton functions for packed weights: the scales of groups of 32 quants, and integer products with them.

    load_groups(quants, ...)      # the words of some groups, and the scales and offsets of both halves
    dot_groups(words, ...)        # their products with x

The format of a weight (packed/formats.py) is given by constants:

    BITS       4 or 8, of a quant
    LEVELS     1: a scale for each group; 2: a scale for each block of 256, times an integer of a group, or 3: of half a
               group
    OFFSETS    offsets of a group: none, one, or one for each half; they have as many levels as the scales
"""

import triton
import triton.language as tl


@triton.jit
def load_groups(
    quants, scales, offsets, group_scales, group_offsets, n, group, N,
    GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Load rows n < N: quants (BLOCK_N, BLOCK_G, BITS words), and the scales and offsets of both halves of a group."""
    place = n[:, None].to(tl.int64) * GROUPS + group[None, :]
    within = (n < N)[:, None] & (group < GROUPS)[None, :]
    word = place[:, :, None] * BITS + tl.arange(0, BITS)[None, None, :]
    words = tl.load(quants + word, within[:, :, None], 0, eviction_policy="evict_first")
    # Only one return: Triton also compiles what follows an early one.
    if LEVELS == 1:
        scale = tl.load(scales + place, within, 0.0)
        late_scale = scale
        offset = tl.load(offsets + place, within, 0.0) if OFFSETS else scale
        late_offset = offset
    else:
        block = n[:, None].to(tl.int64) * (GROUPS // 8) + (group // 8)[None, :]
        block_scale = tl.load(scales + block, within, 0.0).to(tl.float32)
        scale, late_scale = _load_products(block_scale, group_scales, place, within, LEVELS - 1)
        offset, late_offset = scale, scale
        if OFFSETS:
            block_offset = tl.load(offsets + block, within, 0.0).to(tl.float32)
            offset, late_offset = _load_products(block_offset, group_offsets, place, within, OFFSETS)
    return words, scale, late_scale, offset, late_offset


@triton.jit
def _load_products(block_factor, integers, place, within, PER_GROUP: tl.constexpr):
    """Return block_factor times the integers of the first and of the second half of each group."""
    first = block_factor * tl.load(integers + PER_GROUP * place, within, 0).to(tl.float32)
    second = first
    if PER_GROUP == 2:
        second = block_factor * tl.load(integers + 2 * place + 1, within, 0).to(tl.float32)
    return first, second


@triton.jit
def pack_bytes(values):
    """Round values (..., 4) from -127 to 127 to bytes and pack them into words (...)."""
    return tl.sum((tl.floor(values + 0.5).to(tl.int32) & 255) << (tl.arange(0, 4) * 8)[None, None, :], 2)


@triton.jit
def dot_groups(
    words, scale, late_scale, offset, late_offset, low, high, x_scale,
    BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr, DP4A: tl.constexpr,
):  # fmt: skip
    """Multiply rows of W with x, given as words `low` and `high` (BLOCK_G, BITS) and scales `x_scale` (BLOCK_G,).

    The words are those of a group in 8 bits; in 4 bits, `low` holds the first half and `high` the second.
    """
    ones = tl.full((1, 1), 0x01010101, tl.int32)
    if BITS == 8:
        dots = _dot4(words, low[None, :, :], 0, DP4A)
        sums = tl.sum(dots, 2).to(tl.float32)
        if LEVELS == 3:
            first = _sum_first_half(dots).to(tl.float32)
            sums = first * scale + (sums - first) * late_scale
        else:
            sums *= scale.to(tl.float32)
        if OFFSETS:
            x_words = _dot4(low, ones, 0, DP4A)[None, :, :]
            x_sum = tl.sum(x_words, 2).to(tl.float32)
            if OFFSETS == 2:
                x_first = _sum_first_half(x_words).to(tl.float32)
                sums += x_first * offset + (x_sum - x_first) * late_offset
            else:
                sums += x_sum * offset.to(tl.float32)
    else:
        # Byte j of a group holds its quants j and j + 16.
        first, last = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
        if LEVELS == 3:
            early = tl.sum(_dot4(first, low[None, :, :], 0, DP4A), 2).to(tl.float32)
            late = tl.sum(_dot4(last, high[None, :, :], 0, DP4A), 2).to(tl.float32)
            x_early = tl.sum(_dot4(low, ones, 0, DP4A), 1).to(tl.float32)[None, :]
            x_late = tl.sum(_dot4(high, ones, 0, DP4A), 1).to(tl.float32)[None, :]
            if OFFSETS:
                sums = early * scale + late * late_scale + x_early * offset + x_late * late_offset
            else:
                sums = (early - 8 * x_early) * scale + (late - 8 * x_late) * late_scale
        else:
            dots = _dot4(first, low[None, :, :], _dot4(last, high[None, :, :], 0, DP4A), DP4A)
            sums = tl.sum(dots, 2).to(tl.float32)
            x_sum = tl.sum(_dot4(low, ones, _dot4(high, ones, 0, DP4A), DP4A), 1).to(tl.float32)[None, :]
            if OFFSETS:
                sums = sums * scale.to(tl.float32) + x_sum * offset.to(tl.float32)
            else:
                sums = (sums - 8 * x_sum) * scale.to(tl.float32)
    return tl.sum(sums * x_scale[None, :], 1)


@triton.jit
def _sum_first_half(sums):
    """Return the sums of the first four of eight words: (..., 8) -> (...)."""
    return tl.sum(tl.where((tl.arange(0, 8) < 4)[None, None, :], sums, 0), 2)


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
