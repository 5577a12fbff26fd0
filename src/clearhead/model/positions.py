"""Where a token stands, told in one of three places: added to embeddings, rotated into q and k, or added to scores.

    rotation = rotation_for(Rope(), positions, width=64, dtype=torch.float32); q = rotation.turn(q)

Frequencies are computed in float32, or in float64 where the model is: θ^(-2j/width), book B1-B4.
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
    RelativeBuckets,
    Rope,
    SinusoidalPositions,
    YarnScaling,
)

# --- added to embeddings


def sinusoids(positions: Tensor, width: int, config: SinusoidalPositions, dtype: torch.dtype) -> Tensor:
    """(..., T) -> (..., T, D). Both members of a pair share the exponent 2k/D (slip 1 of the book).

    In float64, as the tables of released models were made; in float32 position 1000 is off by up to 6e-5.
    """
    precise = torch.float32 if positions.device.type == "mps" else torch.float64
    num_sines = (width + 1) // 2
    steps = torch.arange(num_sines, device=positions.device, dtype=precise)
    span = max(num_sines - 1, 1) if config.layout == "halves_to_end" else width / 2
    angles = positions[..., None].to(precise) / 10000 ** (steps / span)
    pair = (angles.sin().to(dtype), angles.cos().to(dtype))
    if config.layout == "interleaved":
        return torch.stack(pair, dim=-1).flatten(-2)[..., :width]
    return torch.cat(pair, dim=-1)[..., :width]


# --- rotated into queries and keys


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one forward, (B or 1, 1, T, width / 2), for all layers with the same Rope."""

    cosine: Tensor
    sine: Tensor
    pairing: str

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the first `width` entries of each head: (u, v) -> (u·cos - v·sin, v·cos + u·sin). x (B, N, T, H)."""
        width = 2 * self.cosine.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        neighbours = self.pairing == "interleaved"
        u, v = (turned[..., ::2], turned[..., 1::2]) if neighbours else turned.chunk(2, dim=-1)
        pair = (u * self.cosine - v * self.sine, v * self.cosine + u * self.sine)
        turned = torch.stack(pair, dim=-1).flatten(-2) if neighbours else torch.cat(pair, dim=-1)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rotation_for(rope: Rope, positions: Tensor, width: int, dtype: torch.dtype) -> Rotation:
    """positions (B or 1, T). Angles in float32 even for half-precision models, then rounded to `dtype`."""
    precise = torch.promote_types(dtype, torch.float32)
    frequencies = rope_frequencies(rope, positions, rope.width or width, precise)
    angles = positions[:, None, :, None].to(precise) * frequencies
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype), rope.pairing)


def rope_frequencies(rope: Rope, positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(width / 2,) radians per position; scalings as in the papers and model cards that introduced them."""
    exponents = torch.arange(0, width, 2, device=positions.device).to(dtype) / width
    frequencies = 1 / rope.theta**exponents  # to the last bit as the references divide
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case DynamicScaling(factor=factor, original_context=original):
            # A pure function of the length at hand; keys cached under another length are not re-rotated.
            length = (positions.max() + 1).clamp(min=original).to(dtype)
            stretch = factor * length / original - (factor - 1)
            return 1 / (rope.theta * stretch ** (width / (width - 2))) ** exponents
        case Llama3Scaling():
            return llama3_frequencies(frequencies, rope.scaling)
        case YarnScaling():
            return yarn_frequencies(frequencies, rope.theta, rope.scaling)


def llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # low = high leaves no room for a blend (Llama 4 Scout): a step at `low`.
    kept = ((turns - low) / (high - low)).clamp(0, 1) if high > low else (turns >= low).to(turns.dtype)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def yarn_frequencies(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    width = 2 * len(frequencies)

    def pair_turning(turns: float) -> float:
        """The index of the pair that makes this many turns within the original context."""
        return width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pairs = torch.arange(len(frequencies), device=frequencies.device).to(frequencies.dtype)
    interpolated = ((pairs - low) / (high - low)).clamp(0, 1)
    return interpolated * frequencies / scaling.factor + (1 - interpolated) * frequencies


# --- added to scores; distance = query index - key index, (B or 1, T, S)


def bucket_of(distance: Tensor, config: RelativeBuckets) -> Tensor:
    """Half of the buckets for exact small distances, half growing as the logarithm up to max_distance."""
    num_buckets, offset = config.num_buckets, torch.zeros_like(distance)
    if config.bidirectional:
        num_buckets //= 2
        offset = (distance < 0) * num_buckets  # keys ahead of the query
        distance = distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = num_buckets // 2
    # Distances below `exact` take the other branch; the clamp only keeps the logarithm finite there.
    growth = (distance.clamp(min=exact).float() / exact).log() / math.log(config.max_distance / exact)
    coarse = (exact + (growth * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, coarse)


def alibi_slopes(num_heads: int, config: Alibi) -> list[float]:
    """2^(-max_bias·k/p) for the largest power of two p; further heads take the odd steps of the next power."""
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-config.max_bias * k / power) for k in range(1, power + 1)]
    between = [2 ** (-config.max_bias * (2 * k - 1) / (2 * power)) for k in range(1, num_heads - power + 1)]
    return slopes + between


def alibi_bias(distance: Tensor, num_heads: int, config: Alibi, dtype: torch.dtype) -> Tensor:
    """(B or 1, N, T, S): -slope · |distance|."""
    slopes = torch.tensor(alibi_slopes(num_heads, config), device=distance.device, dtype=dtype)
    return -slopes[:, None, None] * distance.abs()[:, None].to(dtype)
