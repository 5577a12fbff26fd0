"""Weights in few bits: groups of 32 along a row share a scale, and where they have one an offset.

    packed = pack(weight, "int4"); y = functional.linear(x, packed.unpack(x.dtype))

value = scale · quant + offset, as in GGUF's Q8_0, Q4_0 and Q4_1, whose blocks are held here as they are: only scales
and quants stand apart, so that a kernel reads each in long runs. Four bits without an offset mean quant - 8.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.errors import ClearheadError

GROUP = 32
UNPACKED_AT_ONCE = 1 << 22
Bits = Literal["int8", "int4"]


@dataclass(frozen=True)
class Packed:
    quants: Tensor  # (N, K) int8, or (N, K / 2) uint8: byte j of a group holds its values j and j + 16
    scales: Tensor  # (N, K / 32) float16
    offsets: Tensor | None  # (N, K / 32) float16
    columns: int  # K before it was filled up to a multiple of 64

    @property
    def shape(self) -> tuple[int, int]:
        return self.quants.shape[0], self.columns

    @property
    def num_bytes(self) -> int:
        tensors = (self.quants, self.scales, *(() if self.offsets is None else (self.offsets,)))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def rows(self, index: Tensor | slice) -> "Packed":
        offsets = None if self.offsets is None else self.offsets[index]
        return Packed(self.quants[index], self.scales[index], offsets, self.columns)

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, K) numbers; some rows at a time, so that little is held beside them."""
        numbers = torch.empty(self.shape, dtype=dtype, device=self.quants.device)
        for rows in pieces(numbers):
            numbers[rows] = self.rows(rows).in_float32()
        return numbers

    def in_float32(self) -> Tensor:
        values = self.values().unflatten(-1, (-1, GROUP)).float() * self.scales.float()[..., None]
        if self.offsets is not None:
            values += self.offsets.float()[..., None]
        return values.flatten(-2)[..., : self.columns]

    def values(self) -> Tensor:
        """(N, K) int8, around zero where there is no offset."""
        if self.quants.dtype == torch.int8:
            return self.quants
        groups = self.quants.unflatten(-1, (-1, GROUP // 2))
        both = torch.cat((groups & 15, groups >> 4), dim=-1).flatten(-2).to(torch.int8)
        return both if self.offsets is not None else both - 8


def pieces(matrix: Tensor) -> list[slice]:
    """Its rows, some at a time."""
    at_once = max(1, UNPACKED_AT_ONCE // matrix.shape[1])
    return [slice(start, start + at_once) for start in range(0, len(matrix), at_once)]


def pack(weight: Tensor, bits: Bits) -> Packed:
    """Round a matrix (N, K) to the nearest of 255 or 16 steps in each group of 32; of experts (E, N, K) all rows."""
    rows = weight.flatten(0, -2)
    packed = [pack_rows(rows[piece], bits) for piece in pieces(rows)]
    offsets = [part.offsets for part in packed if part.offsets is not None]
    return Packed(
        torch.cat([part.quants for part in packed]),
        torch.cat([part.scales for part in packed]),
        torch.cat(offsets) if offsets else None,
        weight.shape[-1],
    )


def pack_rows(weight: Tensor, bits: Bits) -> Packed:
    if not weight.isfinite().all():
        raise ClearheadError("a weight that is NaN or infinite cannot be quantised; the model is damaged")
    groups = functional.pad(weight.float(), (0, -weight.shape[1] % (2 * GROUP))).unflatten(-1, (-1, GROUP))
    if bits == "int8":
        scales = as_half(groups.abs().amax(dim=-1) / 127)
        quants = (groups / nonzero(scales)).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        return Packed(quants, scales, None, weight.shape[1])
    # With an offset a group's own range is used whole, and weights that come from such blocks are met again exactly.
    lowest, highest = groups.aminmax(dim=-1)
    scales, offsets = as_half((highest - lowest) / 15), as_half(lowest)
    quants = ((groups - offsets.float()[..., None]) / nonzero(scales)).round().clamp(0, 15).to(torch.uint8)
    return Packed(nibbles(quants), scales, offsets, weight.shape[1])


def nibbles(quants: Tensor) -> Tensor:
    """(..., G, 32) values below 16 -> (..., G · 16) bytes."""
    return (quants[..., : GROUP // 2] | (quants[..., GROUP // 2 :] << 4)).flatten(-2)


def as_half(scales: Tensor) -> Tensor:
    if scales.abs().max() > torch.finfo(torch.float16).max:
        raise ClearheadError("these weights are too large to be quantised: a scale exceeds float16")
    return scales.to(torch.float16)


def nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales.float())[..., None]


def pack_gguf_blocks(blocks: Tensor, rows: int, kind: str) -> Packed:
    """GGUF's own blocks (num_blocks, bytes) uint8 of a matrix with this many rows, nothing rounded."""
    blocks = blocks.view(rows, -1, blocks.shape[-1])
    columns = blocks.shape[1] * GROUP
    if blocks.shape[1] % 2:
        blocks = functional.pad(blocks, (0, 0, 0, 1))
    start = 4 if kind == "Q4_1" else 2
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    offsets = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0] if kind == "Q4_1" else None
    quants = blocks[..., start:].flatten(-2)
    return Packed(quants.view(torch.int8) if kind == "Q8_0" else quants, scales, offsets, columns)


NATIVE_BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")
"""Block types of GGUF that run without a change."""
