"""Position encodings: added to embeddings, rotated into queries and keys, or added to attention scores (book B1-B4).

    rotation = make_rotation(Rope(), positions, width=64, dtype=torch.float32); q = rotation.rotate(q)

Rotary frequencies θ^(-2j/width) are computed in float32, or in float64 for a model in float64.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.architecture import (
    Alibi,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RelativeBuckets,
    Rope,
    SinusoidalPositions,
    YarnScaling,
)

# --- added to embeddings


def sinusoids(positions: Tensor, width: int, config: SinusoidalPositions, dtype: torch.dtype) -> Tensor:
    """Return sinusoidal encodings: positions (..., T) -> (..., T, D).

    The sine and cosine of a pair share the exponent 2k/D (erratum 1 of the book). They are computed in float64, like
    the tables of released models; in float32, position 1000 would be off by up to 6e-5.
    """
    compute_dtype = torch.float32 if positions.device.type == "mps" else torch.float64  # MPS has no float64
    num_sines = (width + 1) // 2
    steps = torch.arange(num_sines, device=positions.device, dtype=compute_dtype)
    span = max(num_sines - 1, 1) if config.layout == "halves_to_end" else width / 2
    angles = (positions[..., None] + config.offset).to(compute_dtype) / 10000 ** (steps / span)
    pair = (angles.sin().to(dtype), angles.cos().to(dtype))
    if config.layout == "interleaved":
        return torch.stack(pair, dim=-1).flatten(-2)[..., :width]
    return torch.cat(pair, dim=-1)[..., :width]


# --- rotated into queries and keys


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines (B or 1, 1, T, width / 2) of one forward pass, shared by all layers with the same Rope."""

    cosine: Tensor
    sine: Tensor
    pairing: str

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the first `width` entries of each head of x (B, N, T, H): (u, v) -> (u·cos - v·sin, v·cos + u·sin)."""
        width = 2 * self.cosine.shape[-1]
        rotated, rest = x[..., :width], x[..., width:]
        interleaved = self.pairing == "interleaved"
        u, v = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
        pair = (u * self.cosine - v * self.sine, v * self.cosine + u * self.sine)
        rotated = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def make_rotation(rope: Rope, positions: Tensor, width: int, dtype: torch.dtype) -> Rotation:
    """Return the rotation for positions (B or 1, T) and heads of `width` entries.

    Angles are computed in float32 even for half-precision models, then cosine and sine are rounded to `dtype`.
    """
    compute_dtype = torch.promote_types(dtype, torch.float32)
    frequencies = rope_frequencies(rope, positions, rope.width or width, compute_dtype)
    angles = positions[:, None, :, None].to(compute_dtype) * frequencies
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype), rope.pairing)


def rope_frequencies(rope: Rope, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the frequencies in radians per position, scaled as in the papers and model cards.

    (width / 2,), or (B or 1, 1, 1, width / 2) if they depend on the length of each text.
    """
    exponents = torch.arange(0, width, 2, device=positions.device).to(dtype) / width
    frequencies = 1 / rope.theta**exponents  # divided like this, they equal the references' to the last bit
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case DynamicScaling(factor=factor, original_context=original):
            # A pure function of the current length: keys cached at another length are not rotated again. Each text of
            # a batch has its own length; transformers takes that of the longest for all.
            length = _text_lengths(positions).clamp(min=original).to(dtype)
            stretch = factor * length / original - (factor - 1)
            return 1 / (rope.theta * stretch ** (width / (width - 2))) ** exponents
        case Llama3Scaling():
            return llama3_frequencies(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn_frequencies(frequencies, rope.theta, rope.scaling)
        case LongRopeScaling():
            # Keys cached up to the original context are not rotated again; generation reads such a text again.
            short, long = (
                1 / (torch.tensor(factors, dtype=dtype, device=positions.device) * rope.theta**exponents)
                for factors in (rope.scaling.short_factors, rope.scaling.long_factors)
            )
            return torch.where(_text_lengths(positions) > rope.scaling.original_context, long, short)


def _text_lengths(positions: Tensor) -> Tensor:
    """Return the length of each text up to its last position (B or 1, T) -> (B or 1, 1, 1, 1)."""
    return (positions.amax(dim=1) + 1)[:, None, None, None]


def llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scale rotary frequencies as Llama 3.1 does: divide low ones by `factor`, keep high ones, blend in between."""
    rotations = scaling.original_context * frequencies / (2 * math.pi)  # within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # If low equals high (Llama 4 Scout), there is no blend but a step at `low`.
    kept = ((rotations - low) / (high - low)).clamp(0, 1) if high > low else (rotations >= low).to(rotations.dtype)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn_frequencies(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    """Scale rotary frequencies as YaRN does: interpolate slow pairs, keep fast ones, blend in between."""
    width = 2 * len(frequencies)

    def pair_with_rotations(rotations: float) -> float:
        """Return the index of the pair that makes this many full rotations within the original context."""
        return width * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = torch.arange(len(frequencies), device=frequencies.device).to(frequencies.dtype)
    interpolated = ((pairs - low) / (high - low)).clamp(0, 1)
    return interpolated * frequencies / scaling.factor + (1 - interpolated) * frequencies


# --- added to scores; distance = query index - key index, (B or 1, T, S)


def relative_position_bucket(distance: Tensor, config: RelativeBuckets) -> Tensor:
    """Return the T5 bucket of each distance (B or 1, T, S).

    Half of the buckets hold one small distance each, the other half grows logarithmically up to max_distance.
    """
    num_buckets = config.num_buckets
    offset = torch.zeros_like(distance)
    if config.bidirectional:
        num_buckets //= 2
        offset = (distance < 0) * num_buckets  # keys after the query
        distance = distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = num_buckets // 2
    # The clamp only keeps the logarithm finite; distances below `exact` do not use it.
    growth = (distance.clamp(min=exact).float() / exact).log() / math.log(config.max_distance / exact)
    coarse = (exact + (growth * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, coarse)


def alibi_slopes(num_heads: int, config: Alibi) -> list[float]:
    """Return one slope per head: 2^(-max_bias·k/p), where p is the largest power of two up to num_heads.

    Further heads take the odd steps of the next power of two.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-config.max_bias * k / power) for k in range(1, power + 1)]
    between = [2 ** (-config.max_bias * (2 * k - 1) / (2 * power)) for k in range(1, num_heads - power + 1)]
    return slopes + between


def alibi_bias(distance: Tensor, num_heads: int, config: Alibi, dtype: torch.dtype) -> Tensor:
    """Return -slope · |distance|: (B or 1, T, S) -> (B or 1, N, T, S)."""
    slopes = torch.tensor(alibi_slopes(num_heads, config), device=distance.device, dtype=dtype)
    return -slopes[:, None, None] * distance.abs()[:, None].to(dtype)
