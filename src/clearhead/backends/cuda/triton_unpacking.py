"""A Triton kernel that turns packed weights into plain ones, for products of many rows.

    unpack_rows[grid](y, ...)      y = scale · quant + offset, which reads and writes every byte once
    load_values(quants, ...)       the values of some rows, for other kernels

PyTorch's operations do the same in several passes over float32 values, which takes ten times as long.
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_groups import load_groups


@triton.jit
def unpack_rows(
    y, quants, scales, offsets, group_scales, group_offsets, N,
    K: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Write W (N, K) to y. The packed W has GROUPS groups of 32 values per row, as in multiply_packed_row."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    plain = load_values(
        quants, scales, offsets, group_scales, group_offsets, n, group, N, GROUPS, BITS, OFFSETS, LEVELS
    )
    column = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    target = y + n[:, None, None].to(tl.int64) * K + column
    tl.store(target, plain.to(y.dtype.element_ty), (n < N)[:, None, None] & (column < K))


@triton.jit
def load_values(
    quants, scales, offsets, group_scales, group_offsets, n, group, N,
    GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Return the values of these groups of rows n in float32: (rows, groups, 32)."""
    words, scale, late_scale, offset, late_offset = load_groups(
        quants, scales, offsets, group_scales, group_offsets, n, group, N, GROUPS, BITS, OFFSETS, LEVELS
    )
    place = tl.arange(0, 32)[None, None, :]
    if BITS == 8:
        values = _bytes_in_order(words)
    else:  # byte j of a group holds its values j and j + 16
        early, late = _bytes_in_order(words & 0x0F0F0F0F), _bytes_in_order((words >> 4) & 0x0F0F0F0F)
        values = tl.reshape(tl.trans(tl.join(early, late), 0, 1, 3, 2), (words.shape[0], words.shape[1], 32))
        if not OFFSETS:
            values -= 8
    plain = values.to(tl.float32) * _of_halves(scale, late_scale, place, LEVELS == 3)
    if OFFSETS:
        plain += _of_halves(offset, late_offset, place, OFFSETS == 2)
    return plain


@triton.jit
def _of_halves(first, second, place, DIFFER: tl.constexpr):
    """Return the number of each place (1, 1, 32) in a group: (N, G, 1), or (N, G, 32) if the halves DIFFER."""
    numbers = first.to(tl.float32)[:, :, None]
    if DIFFER:
        numbers = tl.where(place < 16, numbers, second.to(tl.float32)[:, :, None])
    return numbers


@triton.jit
def _bytes_in_order(words):
    """Return the signed bytes of words (N, G, W), those of a word side by side: (N, G, 4 W)."""
    even = tl.interleave(words << 24 >> 24, words << 8 >> 24)
    return tl.interleave(even, tl.interleave(words << 16 >> 24, words >> 24))
