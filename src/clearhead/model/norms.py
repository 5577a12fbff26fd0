"""Normalization layers. Their formulas are in architecture/norms.py.

norm = build_norm(RmsNorm(epsilon=1e-5), width=64); y = norm(x)   # (..., D) -> (..., D)
"""

import torch
from torch import Tensor, nn

from clearhead.architecture import DeviationNorm, LayerNorm, Norm, RmsNorm


def build_norm(config: Norm, width: int) -> nn.Module:
    """Return the normalization layer of a config."""
    match config:
        case RmsNorm():
            return RmsNormLayer(config, width)
        case LayerNorm():
            return nn.LayerNorm(width, eps=config.epsilon, bias=config.bias)
        case DeviationNorm():
            return DeviationNormLayer(config, width)


def root_mean_square(x: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x²) + epsilon), computed and returned in at least float32."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


class RmsNormLayer(nn.Module):
    """x / sqrt(mean(x²) + epsilon) · weight."""

    def __init__(self, config: RmsNorm, width: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(width) if config.unit_offset else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        normed = root_mean_square(x, self.config.epsilon)
        if not self.config.scale_in_float32:
            normed = normed.to(x.dtype)
        weight = self.weight.to(normed.dtype)
        return (normed * (1 + weight if self.config.unit_offset else weight)).to(x.dtype)


class DeviationNormLayer(nn.Module):
    """(x - mean) / (deviation + epsilon) · weight + bias."""

    def __init__(self, config: DeviationNorm, width: int):
        super().__init__()
        self.epsilon = config.epsilon
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        centered = x - x.mean(-1, keepdim=True)
        return self.weight * centered / (x.std(-1, keepdim=True) + self.epsilon) + self.bias
