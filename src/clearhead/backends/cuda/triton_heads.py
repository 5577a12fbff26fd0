"""Triton functions that the attention kernels share: query and key heads, and what is added to their scores."""

import triton
import triton.language as tl


@triton.jit
def norm_and_rotate(
    heads, norm, epsilon, cosine, sine, position,
    PAIRS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, NORMED_AFTER: tl.constexpr = False,
):  # fmt: skip
    """Load, normalize and rotate heads: pointers (rows, 1) -> values (rows, BLOCK_H), entry · cos ± partner · sin.

    position: that of all rows, or (rows, 1). BLOCK_H: H rounded up to a power of two; entries beyond H are 0.
    NORMED_AFTER: normalize after the rotation, without a weight.
    """
    h = tl.arange(0, BLOCK_H)
    inside = (h < H)[None, :]
    own = tl.load(heads + h[None, :], None if H == BLOCK_H else inside, None if H == BLOCK_H else 0.0).to(tl.float32)
    if NORMED:
        factor = tl.rsqrt(tl.sum(own * own, 1) / H + epsilon)[:, None]
        own *= factor * (tl.load(norm + h, h < H, 0.0)[None, :].to(tl.float32) + UNIT_OFFSET)
    if PAIRS == 0:
        if NORMED_AFTER:
            own *= tl.rsqrt(tl.sum(own * own, 1) / H + epsilon)[:, None]
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
    rotated = own * c + tl.where(first, -1.0, 1.0)[None, :] * other * s
    if NORMED_AFTER:
        rotated *= tl.rsqrt(tl.sum(rotated * rotated, 1) / H + epsilon)[:, None]
    return rotated


@triton.jit
def query_factor(position, scale, temperature, floor, TEMPERED: tl.constexpr):
    """Return what multiplies the query at `position`: the scale, and with TEMPERED Llama 4's temperature."""
    factor = scale
    if TEMPERED:
        factor = scale * (1 + temperature * tl.log(1.0 + ((position + 1) // floor).to(tl.float32)))
    return factor


@triton.jit
def adjust_scores(scores, slope, distance, softcap, CAPPED: tl.constexpr, ALIBI: tl.constexpr):
    """Cap the scores (rows, keys) smoothly at ± softcap, and subtract slope · |distance| (ALiBi); slope (rows, 1)."""
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    if ALIBI:
        scores -= slope * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def bucket_bias(bias, buckets, n, distance, N: tl.constexpr, REACH: tl.constexpr):
    """Return T5's bias of heads n (rows, 1) for keys at `distance` (1 or rows, keys), or both of another common shape.

    bias (num_buckets, N). buckets (2 REACH + 1,): those of the distances from -REACH to REACH; farther ones have the
    bucket of the last distance.
    """
    bucket = tl.load(buckets + REACH + tl.minimum(tl.maximum(distance, -REACH), REACH))
    return tl.load(bias + bucket * N + n).to(tl.float32)
