"""Random numbers without a generator: a pure function of (seed, step, token), the same in every batch and device.

    tokens = draw(logits, seeds, steps)    # (B, V), (B,), (B,) -> (B,)

A sequence's whole random state is its seed and how many tokens it has drawn. The numbers come from SplitMix64 (Steele,
Lea & Flood 2014), whose n-th number is a hash of seed + n · GOLDEN, so that any of them is reached at once: number
`step` of the sequence's seed is itself a seed, and its number `token` is the one for that token.

The token is drawn by the Gumbel-max trick: argmax of logits + g with g = -log(-log(u)), u uniform in (0, 1), has the
law softmax(logits). Nothing is summed over the vocabulary, hence nothing depends on an order of summation.
"""

import torch
from torch import Tensor


def signed(constant: int) -> int:
    """64 bits as torch.int64 holds them."""
    return constant - 2**64 if constant >= 2**63 else constant


GOLDEN = signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
FIRST_FACTOR = signed(0xBF58476D1CE4E5B9)  # with the shifts below: David Stafford's "Mix13"
SECOND_FACTOR = signed(0x94D049BB133111EB)


def splitmix(seeds: Tensor, index: Tensor) -> Tensor:
    """Number `index`, counted from 0, of SplitMix64 started at each seed; both int64, broadcast."""
    z = seeds + (index + 1) * GOLDEN  # int64 wraps around at 2^64, as meant
    z = (z ^ shift_right(z, 30)) * FIRST_FACTOR
    z = (z ^ shift_right(z, 27)) * SECOND_FACTOR
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, num_bits: int) -> Tensor:
    """Zeros come in from the left; >> alone would repeat the sign."""
    return (z >> num_bits) & (2 ** (64 - num_bits) - 1)


def uniforms(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """(B,), (B,) -> (B, count) float64 in (0, 1): the middles of 2^52 equal parts, so neither end occurs."""
    index = torch.arange(count, device=seeds.device)
    numbers = splitmix(splitmix(seeds, steps)[:, None], index)
    return (shift_right(numbers, 12).double() + 0.5) * 2.0**-52


def draw(logits: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """One token of each row from softmax(logits): (B, V), (B,), (B,) -> (B,)."""
    noise = -torch.log(-torch.log(uniforms(seeds, steps, logits.shape[-1])))
    return (logits.double() + noise).argmax(dim=-1)
