"""Weights of Hugging Face folders in MXFP4 (gpt-oss): blocks of 32 values of 4 bits that share a power of two.

    weight = dequantize_mxfp4(blocks, scales)     # (E, N, G, 16) and (E, N, G) bytes -> (E, 32 G, N) in bfloat16

A byte holds two values, the first in its low half. Source: OCP Microscaling Formats 1.0.
"""

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1
_LEVELS = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_BYTES_PER_BLOCK, _EXPONENT_BIAS = 16, 127
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of all experts, stored (in, out) as in unquantized checkpoints, in bfloat16."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise RuntimeError(f"blocks and scales must be bytes, not {blocks.dtype} and {scales.dtype}")
    if blocks.ndim != 4 or blocks.shape[3] != _BYTES_PER_BLOCK or blocks.shape[:3] != scales.shape:
        raise RuntimeError(
            f"blocks of shape {tuple(blocks.shape)} do not fit scales of shape {tuple(scales.shape)}; "
            f"they must have the shape of the scales and {_BYTES_PER_BLOCK} bytes each"
        )
    levels = torch.tensor(_LEVELS, dtype=torch.bfloat16)
    experts = []
    for block, scale in zip(blocks, scales, strict=True):  # one expert at a time bounds the memory
        values = torch.stack((levels[(block & 15).int()], levels[(block >> 4).int()]), dim=-1)  # (N, G, 16, 2)
        exponents = scale.int()[..., None, None] - _EXPONENT_BIAS
        experts.append(torch.ldexp(values, exponents).to(torch.bfloat16).flatten(1).T)  # (N, 32 G) -> (32 G, N)
    return torch.stack(experts)
