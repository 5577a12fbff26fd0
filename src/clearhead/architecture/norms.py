"""Configs of the normalization layers. Their formulas are computed in model/norms.py.

RmsNorm(epsilon=1e-5)
"""

from dataclasses import dataclass

from clearhead.config import CheckedConfig


@dataclass(frozen=True, kw_only=True)
class RmsNorm(CheckedConfig):
    """x / sqrt(mean(x²) + epsilon) · weight (Zhang & Sennrich 2019)."""

    epsilon: float
    unit_offset: bool = False  # the stored weight is weight - 1 (Gemma)
    scale_in_float32: bool = False  # in half precision: multiply by the weight before rounding (Gemma, Grok)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(CheckedConfig):
    """(x - mean) / sqrt(variance + epsilon) · weight + bias (Ba et al. 2016)."""

    epsilon: float
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class DeviationNorm(CheckedConfig):
    """(x - mean) / (deviation + epsilon) · weight + bias, with the unbiased deviation (Annotated Transformer)."""

    epsilon: float


Norm = RmsNorm | LayerNorm | DeviationNorm
