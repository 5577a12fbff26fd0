"""Normalization layers. Their formulas are in architecture/norms.py.

norm = build_norm(RmsNorm(epsilon=1e-5), width=64); y = norm(x)   # (..., D) -> (..., D)
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import DeviationNorm, HeadNorm, LayerNorm, Norm, RmsNorm


def build_norm(config: Norm, width: int) -> nn.Module:
    """Return the normalization layer of a config."""
    match config:
        case RmsNorm():
            return RmsNormLayer(config, width)
        case LayerNorm(unit_offset=True):
            return OffsetLayerNorm(width, eps=config.epsilon, bias=config.bias)
        case LayerNorm():
            return nn.LayerNorm(width, eps=config.epsilon, elementwise_affine=config.weight, bias=config.bias)
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


class OffsetLayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(variance + epsilon) · (1 + weight) + bias (Nemotron)."""

    def reset_parameters(self) -> None:
        """Set the weight to 0, which multiplies by 1, and the bias to 0."""
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class PerHeadNorm(nn.Module):
    """Normalize each head and multiply it by its own weight (Cohere, StableLM)."""

    def __init__(self, config: RmsNorm | LayerNorm, num_heads: int, head_width: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.ones(num_heads, head_width))

    def forward(self, heads: Tensor) -> Tensor:
        """heads (B, N, T, H) -> (B, N, T, H)."""
        x = heads.to(torch.promote_types(heads.dtype, torch.float32))
        if isinstance(self.config, LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        return (root_mean_square(x, self.config.epsilon) * self.weight[:, None].to(x.dtype)).to(heads.dtype)


class JointNorm(nn.Module):
    """Normalize the entries of all heads together, as one vector (OLMo 2)."""

    def __init__(self, config: RmsNorm | LayerNorm, num_heads: int, head_width: int):
        super().__init__()
        self.norm = build_norm(config, num_heads * head_width)

    def forward(self, heads: Tensor) -> Tensor:
        """heads (B, N, T, H) -> (B, N, T, H)."""
        joint = heads.transpose(1, 2)  # (B, T, N, H)
        return cast(Tensor, self.norm(joint.flatten(2))).view(joint.shape).transpose(1, 2)


def build_head_norm(config: HeadNorm, num_heads: int, head_width: int) -> nn.Module:
    """Return the norm of the queries or keys (B, N, T, H) of an attention layer."""
    match config.scope:
        case "shared":
            return build_norm(config.norm, head_width)
        case "per_head":
            return PerHeadNorm(config.norm, num_heads, head_width)
        case "joint":
            return JointNorm(config.norm, num_heads, head_width)


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
