"""Change the sampling rate by windowed-sinc interpolation (Smith 1984, "A flexible sampling-rate conversion method").

samples = resample(samples, 44_100, 16_000)

Output n is a weighted sum of the input around n · rate / new_rate. The weights are a sinc whose cutoff lies below half
of the lower rate, times a Hann window. They depend on the fraction of the position only, so they are computed once for
each of its `new_rate / gcd` values (a polyphase filter).
"""

import math

import torch
from torch import Tensor

_NUM_CROSSINGS = 64  # zero crossings of the sinc on either side
_CUTOFF = 0.97  # of half of the lower rate; leaves room for the transition band
_BLOCK = 1 << 12  # outputs computed at a time


def resample(samples: Tensor, rate: int, new_rate: int) -> Tensor:
    """Return samples (N,) at another rate, (⌈N · new_rate / rate⌉,); equal rates return them unchanged."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    step, num_phases = rate // divisor, new_rate // divisor
    cutoff = _CUTOFF * min(1.0, new_rate / rate)  # in units of half of the input rate
    radius = math.ceil(_NUM_CROSSINGS / cutoff)
    weights = _polyphase_weights(num_phases, radius, cutoff).to(samples.dtype)
    num_outputs = -(-len(samples) * num_phases // step)
    padded = torch.nn.functional.pad(samples, (radius, radius + 1))
    windows = padded.unfold(0, 2 * radius + 1, 1)  # (N + 1, 2·radius + 1), a view
    blocks = []
    for start in range(0, num_outputs, _BLOCK):
        positions = torch.arange(start, min(start + _BLOCK, num_outputs)) * step
        chosen = weights[positions % num_phases]
        blocks.append((windows[positions // num_phases] * chosen).sum(dim=1))
    return torch.cat(blocks)


def _polyphase_weights(num_phases: int, radius: int, cutoff: float) -> Tensor:
    """Return the weights (num_phases, 2·radius + 1) of the inputs around a position, for each fraction of it."""
    fractions = torch.arange(num_phases, dtype=torch.float64)[:, None] / num_phases
    distances = torch.arange(-radius, radius + 1, dtype=torch.float64) - fractions
    window = torch.cos(distances / (radius + 1) * (math.pi / 2)) ** 2
    return cutoff * torch.sinc(cutoff * distances) * window
