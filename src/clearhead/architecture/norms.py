"""Configs of the normalization layers. Their formulas are computed in model/norms.py.

RmsNorm(epsilon=1e-5)
"""

from dataclasses import dataclass

from clearhead.config import CheckedConfig
from clearhead.errors import require


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
    weight: bool = True  # without it there is no bias either (OLMo)
    unit_offset: bool = False  # the stored weight is weight - 1 (Nemotron)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.weight or not (self.bias or self.unit_offset),
            "a LayerNorm without weight has neither bias nor unit_offset; set both to false",
        )


@dataclass(frozen=True, kw_only=True)
class DeviationNorm(CheckedConfig):
    """(x - mean) / (deviation + epsilon) · weight + bias, with the unbiased deviation (Annotated Transformer)."""

    epsilon: float


Norm = RmsNorm | LayerNorm | DeviationNorm
