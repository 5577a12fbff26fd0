"""Weights of Hugging Face folders in MXFP4 (gpt-oss): blocks of 32 values of 4 bits that share a power of two.

    experts = Mxfp4Experts(blocks, scales); weight = experts.dequantize()     # (E, 32 G, N) in bfloat16

A byte holds two values, the first in its low half. Source: OCP Microscaling Formats 1.0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.backends import PackedWeight, pack_quants, packed_from_tensors

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1
_LEVELS = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_BYTES_PER_BLOCK, _EXPONENT_BIAS = 16, 127
_SMALLEST_HALF, _LARGEST_HALF = -24, 15  # exponents of the powers of two that float16 has


@dataclass(frozen=True)
class Mxfp4Experts:
    """The matrices of all experts, (N, 32 G) each."""

    blocks: Tensor  # (E, N, G, 16) bytes
    scales: Tensor  # (E, N, G) bytes: exponents

    def __post_init__(self) -> None:
        blocks, scales = self.blocks, self.scales
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise RuntimeError(f"blocks and scales must be bytes, not {blocks.dtype} and {scales.dtype}")
        if blocks.ndim != 4 or blocks.shape[3] != _BYTES_PER_BLOCK or blocks.shape[:3] != scales.shape:
            raise RuntimeError(
                f"blocks of shape {tuple(blocks.shape)} do not fit scales of shape {tuple(scales.shape)}; "
                f"they must have the shape of the scales and {_BYTES_PER_BLOCK} bytes each"
            )

    def dequantize(self) -> Tensor:
        """Return the weights (E, 32 G, N), stored (in, out) as in unquantized checkpoints, in bfloat16."""
        levels = torch.tensor(_LEVELS, dtype=torch.bfloat16)
        experts = []
        for block, scale in zip(self.blocks, self.scales, strict=True):  # one expert at a time bounds the memory
            exponents = scale.int()[..., None] - _EXPONENT_BIAS
            experts.append(torch.ldexp(_unpack(block, levels), exponents).to(torch.bfloat16).flatten(1).T)
        return torch.stack(experts)

    def pack(self) -> PackedWeight | None:
        """Return the same values in 5 bits, the rows (E N) of all experts stacked; None if a scale is no float16."""
        doubled = torch.tensor([int(2 * level) for level in _LEVELS], dtype=torch.int8)  # from -12 to 12
        experts = []
        for block, scale in zip(self.blocks, self.scales, strict=True):
            quants = _unpack(block, doubled)
            exponents = torch.where((quants == 0).all(-1), 0, scale.int() - _EXPONENT_BIAS - 1)
            if exponents.min() < _SMALLEST_HALF or exponents.max() > _LARGEST_HALF:
                return None
            scales = torch.exp2(exponents.double()).half()
            experts.append(pack_quants((quants + 16).flatten(1).view(torch.uint8), scales, None, has_fifth_bits=True))
        columns, names = experts[0].columns, experts[0].tensors
        return packed_from_tensors(
            {name: torch.cat([each.tensors[name] for each in experts]) for name in names}, columns
        )


def _unpack(blocks: Tensor, levels: Tensor) -> Tensor:
    """Return the levels (N, G, 32) of the values in blocks (N, G, 16)."""
    return torch.stack((levels[(blocks & 15).int()], levels[(blocks >> 4).int()]), dim=-1).flatten(-2)
