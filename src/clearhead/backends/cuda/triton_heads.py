"""Triton functions that the attention kernels share: load query or key heads, normalize and rotate them."""

import triton
import triton.language as tl


@triton.jit
def norm_and_rotate(
    heads, norm, epsilon, cosine, sine, position,
    PAIRS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Load, normalize and rotate heads: pointers (rows, 1) -> values (rows, BLOCK_H), entry · cos ± partner · sin.

    position: that of all rows, or (rows, 1). BLOCK_H: H rounded up to a power of two; entries beyond H are 0.
    """
    h = tl.arange(0, BLOCK_H)
    inside = (h < H)[None, :]
    own = tl.load(heads + h[None, :], None if H == BLOCK_H else inside, None if H == BLOCK_H else 0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(own * own, 1) / H + epsilon)[:, None]
        own *= factor * (tl.load(norm + h, h < H, 0.0)[None, :].to(tl.float32) + UNIT_OFFSET)
    if PAIRS == 0:
        return own
    pair = (h // 2) if INTERLEAVED else h % PAIRS
    partner = (h ^ 1) if INTERLEAVED else tl.where(h < PAIRS, h + PAIRS, h - PAIRS)
    first = (h % 2 == 0) if INTERLEAVED else h < PAIRS
    rotates = (h < 2 * PAIRS)[None, :]
    partner = tl.where(h < 2 * PAIRS, partner, 0)
    other = tl.load(heads + partner[None, :]).to(tl.float32)
    if NORMED:
        other *= factor * (tl.load(norm + partner)[None, :].to(tl.float32) + UNIT_OFFSET)
    c = tl.load(cosine + position * PAIRS + pair[None, :], rotates, 1.0)
    s = tl.load(sine + position * PAIRS + pair[None, :], rotates, 0.0)
    return own * c + tl.where(first, -1.0, 1.0)[None, :] * other * s
