"""Triton kernels that turn the tokens of running sequences into rows of the token table, in one launch.

    embed_plain[B, parts](...)       x = scale · table[token]
    embed_packed[B, parts](...)      the same for a packed table

Row b belongs to the seat `seats[b]`; without a seat, it gets token 0 at position 0. `columns` are the fields of all
seats (seats.py), the first two of which are token and position. The position is copied for the other parts of the
embedding.
"""

import triton
import triton.language as tl

from clearhead.backends.cuda.triton_unpacking import load_values


@triton.jit
def embed_plain(
    y, positions, seats, columns, num_seats, table, scale,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a part of row b of y (B, K) from a table (V, K), scaled if SCALED."""
    token = _read_token(positions, seats, columns, num_seats, PDL)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    values = tl.load(table + token * K + k, k < K)
    if SCALED:
        values = (values.to(tl.float32) * scale).to(y.dtype.element_ty)
    tl.store(y + tl.program_id(0).to(tl.int64) * K + k, values, k < K)


@triton.jit
def embed_packed(
    y, positions, seats, columns, num_seats, quants, scales, offsets, group_scales, group_offsets, N, scale,
    K: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, OFFSETS: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK_G: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute as embed_plain with a packed table of N rows, of GROUPS groups of 32 values each."""
    token = _read_token(positions, seats, columns, num_seats, PDL)
    group = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    values = load_values(
        quants, scales, offsets, group_scales, group_offsets, token + tl.arange(0, 1), group, N, GROUPS, BITS, OFFSETS,
        LEVELS,
    ).to(y.dtype.element_ty)  # fmt: skip
    if SCALED:
        values = (values.to(tl.float32) * scale).to(y.dtype.element_ty)
    k = group[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    tl.store(y + tl.program_id(0).to(tl.int64) * K + k, values, k < K)


@triton.jit
def _read_token(positions, seats, columns, num_seats, PDL: tl.constexpr):
    """Return the token of row b as int64, and copy its position."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    seat = tl.load(seats + b)
    tl.store(positions + b, tl.load(columns + num_seats + seat, seat >= 0, 0))
    return tl.load(columns + seat, seat >= 0, 0)
