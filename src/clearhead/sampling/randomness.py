"""Random numbers as a pure function of (seed, step, token): the same in every batch and on every device.

    tokens = draw_tokens(logits, seeds, steps)    # (B, V), (B,), (B,) -> (B,)

The random state of a sequence is its seed and the number of tokens it has drawn. The numbers come from SplitMix64
(Steele, Lea & Flood 2014). Its n-th number is a hash of seed + n · GOLDEN, so any of them can be computed directly:

    u(seed, step, token) = splitmix(splitmix(seed, step), token), scaled to (0, 1)

Tokens are drawn by the Gumbel-max trick: argmax of logits + g with g = -log(-log(u)), u uniform in (0, 1), is
distributed as softmax(logits). It sums nothing over the vocabulary, so no result depends on an order of summation.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def _wrap_int64(number: int) -> int:
    """Return the int64 that has the same 64 bits as an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


GOLDEN = _wrap_int64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
FIRST_FACTOR = _wrap_int64(0xBF58476D1CE4E5B9)  # with the shifts below: David Stafford's "Mix13"
SECOND_FACTOR = _wrap_int64(0x94D049BB133111EB)
_FEW = 4  # on a CPU, if at most one token in four can be drawn, only those get random numbers


def splitmix(seeds: Tensor, index: Tensor) -> Tensor:
    """Return number `index`, counted from 0, of SplitMix64 started at each seed; both int64, broadcast."""
    z = seeds + (index + 1) * GOLDEN  # int64 wraps around at 2^64, as intended
    z = (z ^ shift_right(z, 30)) * FIRST_FACTOR
    z = (z ^ shift_right(z, 27)) * SECOND_FACTOR
    return z ^ shift_right(z, 31)


def shift_right(z: Tensor, num_bits: int) -> Tensor:
    """Shift right and fill with zeros; the operator >> alone would copy the sign bit."""
    return (z >> num_bits) & (2 ** (64 - num_bits) - 1)


def uniforms(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """Return numbers in (0, 1): (B,), (B,) -> (B, count) float64.

    They are the midpoints of 2^52 equal intervals, so neither 0 nor 1 occurs.
    """
    index = torch.arange(count, device=seeds.device)
    numbers = splitmix(splitmix(seeds, steps)[:, None], index)
    return _to_uniform(numbers)


def _to_uniform(numbers: Tensor) -> Tensor:
    """Scale int64, taken as unsigned, to (0, 1)."""
    return (shift_right(numbers, 12).double() + 0.5) * 2.0**-52


def draw_tokens(logits: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Draw one token per sequence from softmax(logits): (B, V), (B,), (B,) -> (B,)."""
    if logits.device.type == "cpu":
        places = np.flatnonzero(logits.detach().numpy() != -np.inf)
        if 0 < len(places) <= logits.numel() // _FEW:
            return _draw_from_candidates(logits, seeds, steps, torch.from_numpy(places))
    noise = _gumbel(uniforms(seeds, steps, logits.shape[-1]))
    return (logits.double() + noise).argmax(dim=-1)


def _draw_from_candidates(logits: Tensor, seeds: Tensor, steps: Tensor, places: Tensor) -> Tensor:
    """Draw one token per sequence. `places`: where the flattened logits are finite; only these need random numbers."""
    vocab_size = logits.shape[-1]
    rows, tokens = places // vocab_size, places % vocab_size
    noise = _gumbel(_to_uniform(splitmix(splitmix(seeds, steps)[rows], tokens)))
    values = (logits.reshape(-1)[places].double() + noise).numpy()
    starts = torch.searchsorted(rows, torch.arange(len(logits) + 1)).tolist()
    drawn = [int(tokens[start + values[start:end].argmax()]) if start < end else 0 for start, end in pairwise(starts)]
    return torch.tensor(drawn)


def _gumbel(uniform: Tensor) -> Tensor:
    return -torch.log(-torch.log(uniform))
