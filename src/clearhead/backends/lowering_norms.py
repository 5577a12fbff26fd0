"""Lower norms: the settings and weights of norm modules, in the form that the kernels of both backends read.

settings = lower_norm(stack.final_norm); norms = lower_head_norms(attention)
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead.architecture import HeadNorm, LayerNorm, RotatedHeadNorm
from clearhead.model import (
    Attention,
    DeviationNormLayer,
    JointNorm,
    OffsetLayerNorm,
    PerHeadNorm,
    RmsNormLayer,
)

NormModule = RmsNormLayer | nn.LayerNorm


@dataclass(frozen=True)
class NormSettings:
    """What a kernel needs of a norm module."""

    kind: Literal["rms", "layer", "deviation"]
    epsilon: float
    weight: Tensor
    bias: Tensor | None
    unit_offset: bool  # the weight is stored as its distance from 1


@dataclass(frozen=True)
class HeadNormSettings:
    """The norms of the queries and keys of an attention layer, and where they are applied."""

    query: NormSettings | None
    key: NormSettings | None
    scope: Literal["shared", "per_head", "joint"] = "shared"
    after_rotation: bool = False


def lower_norm(module: nn.Module | None) -> NormSettings | None:
    """Return the settings of a norm module, or None for None and nn.Identity."""
    match module:
        case None | nn.Identity():
            return None
        case RmsNormLayer():
            return NormSettings("rms", module.config.epsilon, module.weight, None, module.config.unit_offset)
        case OffsetLayerNorm():
            return NormSettings("layer", module.eps, module.weight, module.bias, unit_offset=True)
        case nn.LayerNorm():
            weight: Tensor | None = module.weight
            ones = torch.ones(module.normalized_shape) if weight is None else weight
            return NormSettings("layer", module.eps, ones, module.bias, unit_offset=False)
        case DeviationNormLayer():
            return NormSettings("deviation", module.epsilon, module.weight, module.bias, unit_offset=False)
        case JointNorm():
            return lower_norm(module.norm)
        case PerHeadNorm():
            kind: Literal["rms", "layer"] = "layer" if isinstance(module.config, LayerNorm) else "rms"
            return NormSettings(kind, module.config.epsilon, module.weight, None, unit_offset=False)
    raise AssertionError(f"no kernel computes {type(module).__name__}")


def lower_head_norms(attention: Attention) -> HeadNormSettings:
    """Return the norms of the queries and keys of an attention layer."""
    match attention.config.head_norm:
        case HeadNorm() as config:
            query, key = lower_norm(attention.query_norm), lower_norm(attention.key_norm)
            return HeadNormSettings(query, key, config.scope, config.after_rotation)
        case RotatedHeadNorm() as config:
            unit = NormSettings("rms", config.epsilon, torch.ones(attention.config.head_width), None, unit_offset=False)
            return HeadNormSettings(unit, unit, after_rotation=True)
    return HeadNormSettings(None, None)
