"""Quantize weights to 8 or 4 bits: groups of 32 values along a row share a scale and, in some formats, an offset.

    packed = pack(weight, "int4"); y = functional.linear(x, packed.unpack(x.dtype))

value = scale · quant + offset, as in GGUF's Q8_0, Q4_0 and Q4_1. Blocks of these three types are stored without
rounding; only scales and quants are kept in separate tensors, so that a kernel reads each in long runs. In 4-bit
formats without an offset, a stored quant q stands for q - 8.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.errors import ClearheadError

_GROUP_SIZE = 32
ELEMENTS_PER_CHUNK = 1 << 22  # weights that are converted at a time, which bounds the temporary memory
Bits = Literal["int8", "int4"]

NATIVE_BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF block types that `PackedWeight` stores without rounding."""


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix (N, K)."""

    quants: Tensor  # (N, K) int8, or (N, K / 2) uint8: byte j of a group holds its values j and j + 16
    scales: Tensor  # (N, K / 32) float16
    offsets: Tensor | None  # (N, K / 32) float16
    columns: int  # K without the padding to a multiple of 64

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as if the weight were a plain matrix."""
        return self.quants.shape[0], self.columns

    @property
    def num_bytes(self) -> int:
        """Memory of quants, scales and offsets."""
        tensors = (self.quants, self.scales, *(() if self.offsets is None else (self.offsets,)))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def rows(self, index: Tensor | slice) -> "PackedWeight":
        """Return the selected rows; with a slice, they share memory with this weight."""
        offsets = None if self.offsets is None else self.offsets[index]
        return PackedWeight(self.quants[index], self.scales[index], offsets, self.columns)

    def to(self, device: torch.device | str | None) -> "PackedWeight":
        """Return the same weight on another device; None leaves it where it is."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return PackedWeight(self.quants.to(device), self.scales.to(device), offsets, self.columns)

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize to (N, K), a chunk of rows at a time to keep temporary memory small."""
        weight = torch.empty(self.shape, dtype=dtype, device=self.quants.device)
        for rows in _row_chunks(weight):
            weight[rows] = self.rows(rows).dequantize()
        return weight

    def dequantize(self) -> Tensor:
        """Return scale · quant + offset in float32, all rows at once."""
        values = self.integers().unflatten(-1, (-1, _GROUP_SIZE)).float() * self.scales.float()[..., None]
        if self.offsets is not None:
            values += self.offsets.float()[..., None]
        return values.flatten(-2)[..., : self.columns]

    def integers(self) -> Tensor:
        """Return the quants as (N, K) int8, centered on zero if there are no offsets."""
        if self.quants.dtype == torch.int8:
            return self.quants
        groups = self.quants.unflatten(-1, (-1, _GROUP_SIZE // 2))
        quants = torch.cat((groups & 15, groups >> 4), dim=-1).flatten(-2).to(torch.int8)
        return quants if self.offsets is not None else quants - 8


def _row_chunks(matrix: Tensor, max_elements: int | None = None) -> list[slice]:
    """Divide the rows of a matrix into slices of at most `max_elements` values, by default ELEMENTS_PER_CHUNK."""
    rows_per_chunk = max(1, (max_elements or ELEMENTS_PER_CHUNK) // matrix.shape[1])
    return [slice(start, start + rows_per_chunk) for start in range(0, len(matrix), rows_per_chunk)]


def pack(weight: Tensor, bits: Bits, dtype: torch.dtype | None = None) -> PackedWeight:
    """Quantize a matrix (N, K), or experts (E, N, K) as E · N rows, to the nearest of 255 or 16 levels per group.

    With `dtype`, the values are rounded to it first, a few rows at a time.
    """
    rows = weight.flatten(0, -2)
    # The result is allocated first: temporary tensors below it would leave holes in the heap when they are freed.
    packed = _empty_packed_weight(len(rows), weight.shape[-1], bits, weight.device)
    for chunk in _row_chunks(rows, ELEMENTS_PER_CHUNK // 4):  # packing takes several temporary tensors
        source, target = _pack_rows(rows[chunk].to(dtype=dtype), bits), packed.rows(chunk)
        target.quants.copy_(source.quants)
        target.scales.copy_(source.scales)
        if source.offsets is not None and target.offsets is not None:
            target.offsets.copy_(source.offsets)
    return packed


def _empty_packed_weight(num_rows: int, columns: int, bits: Bits, device: torch.device) -> PackedWeight:
    """Allocate a packed weight without setting its values."""
    num_groups = 2 * -(-columns // (2 * _GROUP_SIZE))
    scales = torch.empty(num_rows, num_groups, dtype=torch.float16, device=device)
    if bits == "int8":
        quants = torch.empty(num_rows, num_groups * _GROUP_SIZE, dtype=torch.int8, device=device)
        return PackedWeight(quants, scales, None, columns)
    quants = torch.empty(num_rows, num_groups * _GROUP_SIZE // 2, dtype=torch.uint8, device=device)
    return PackedWeight(quants, scales, torch.empty_like(scales), columns)


def _pack_rows(weight: Tensor, bits: Bits) -> PackedWeight:
    if not weight.isfinite().all():
        raise ClearheadError("a weight is NaN or infinite and cannot be quantized; the checkpoint is damaged")
    groups = functional.pad(weight.float(), (0, -weight.shape[1] % (2 * _GROUP_SIZE))).unflatten(-1, (-1, _GROUP_SIZE))
    if bits == "int8":
        scales = _to_float16(groups.abs().amax(dim=-1) / 127)
        quants = (groups / divisors(scales)).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        return PackedWeight(quants, scales, None, weight.shape[1])
    # The offset lets all 16 levels cover the group's own range, and reproduces weights that came from such blocks.
    lowest, highest = groups.aminmax(dim=-1)
    scales, offsets = _to_float16((highest - lowest) / 15), _to_float16(lowest)
    quants = ((groups - offsets.float()[..., None]) / divisors(scales)).round().clamp(0, 15).to(torch.uint8)
    return PackedWeight(_pack_nibbles(quants), scales, offsets, weight.shape[1])


def _pack_nibbles(quants: Tensor) -> Tensor:
    """Store two 4-bit values per byte: (..., G, 32) -> (..., G · 16)."""
    return (quants[..., : _GROUP_SIZE // 2] | (quants[..., _GROUP_SIZE // 2 :] << 4)).flatten(-2)


def _to_float16(scales: Tensor) -> Tensor:
    if scales.abs().max() > torch.finfo(torch.float16).max:
        raise ClearheadError(
            "the weights are too large to be quantized, because a scale exceeds the range of float16; use full weights"
        )
    return scales.to(torch.float16)


def divisors(scales: Tensor) -> Tensor:
    """Return the scales in float32, with 1 for 0: a group of zeros then becomes quants of zero."""
    return torch.where(scales == 0, 1.0, scales.float())[..., None]


def pack_gguf_blocks(blocks: Tensor, rows: int, block_type: str) -> PackedWeight:
    """Store GGUF blocks (num_blocks, bytes) uint8 of a matrix with `rows` rows, without rounding.

    `block_type` is one of NATIVE_BLOCK_TYPES.
    """
    blocks = blocks.view(rows, -1, blocks.shape[-1])
    columns = blocks.shape[1] * _GROUP_SIZE
    if blocks.shape[1] % 2:
        blocks = functional.pad(blocks, (0, 0, 0, 1))
    quants_start = 4 if block_type == "Q4_1" else 2
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    offsets = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0] if block_type == "Q4_1" else None
    quants = blocks[..., quants_start:].flatten(-2)
    return PackedWeight(quants.view(torch.int8) if block_type == "Q8_0" else quants, scales, offsets, columns)
