"""Quantize weights to 8 or 4 bits: groups of 32 values along a row share a scale and, in some formats, an offset.

    packed = pack(weight, "int4"); y = functional.linear(x, packed.unpack(x.dtype))

value = scale · quant + offset, as in GGUF's Q8_0, Q4_0 and Q4_1. Blocks of these three types are stored without
rounding; only scales and quants are kept in separate tensors, so that a kernel reads each in long runs. In 4-bit
formats without an offset, a stored quant q stands for q - 8. block_formats.py adds formats of 5 and 6 bits, and those
whose groups have small integers that multiply the scale of a block of 256 values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.packed.block_formats import arrange_bits, dequantize_blocks, split_blocks
from clearhead.backends.packed.fitting import fit_quickly
from clearhead.errors import ClearheadError

GROUP_SIZE = 32
ELEMENTS_PER_CHUNK = 1 << 22  # weights that are converted at a time, which bounds the temporary memory
Bits = Literal["int8", "int4"]

NATIVE_BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF block types in which each group of 32 values has a scale of its own and quants of 4 or 8 bits."""

PACKED_PARTS = ("quants", "scales", "offsets", "high_bits", "group_scales", "group_offsets")
"""The tensors of a `PackedWeight`; all but the first two may be None."""

KEPT_BLOCK_TYPES = (*NATIVE_BLOCK_TYPES, "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""GGUF block types whose quants `pack_gguf_blocks` stores as they are; checkpoint/gguf_packing.py converts others."""


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix (N, K)."""

    quants: Tensor  # (N, K) int8, or (N, K / 2) uint8: byte j of a group holds its values j and j + 16
    scales: Tensor  # (N, K / 32) float16, or (N, K / 256) if there are group scales
    offsets: Tensor | None  # as the scales
    columns: int  # K without the padding to a multiple of 64
    high_bits: Tensor | None = None  # (N, bytes) uint8: further bits of the quants, see block_formats.py
    group_scales: Tensor | None = None  # (N, K / 32) uint8, or (N, K / 16) int8: factors of the scales
    group_offsets: Tensor | None = None  # likewise: factors of the offsets

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as if the weight were a plain matrix."""
        return self.quants.shape[0], self.columns

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by the names of the fields."""
        return {name: tensor for name in PACKED_PARTS if (tensor := getattr(self, name)) is not None}

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def num_groups(self) -> int:
        """Groups of 32 values in a row."""
        return self.quants.shape[1] // (GROUP_SIZE if self.quants.dtype == torch.int8 else GROUP_SIZE // 2)

    @property
    def format(self) -> tuple[object, ...]:
        """What two weights must have in common for their rows to be stored in one."""
        return self.columns, *((name, tensor.dtype, tensor.shape[1]) for name, tensor in self.tensors.items())

    @property
    def is_wide(self) -> bool:
        """Whether quants in 8 bits have offsets, or scales of half groups, as only GPU kernels read them."""
        return self.quants.dtype == torch.int8 and (self.offsets is not None or self.has_halves)

    @property
    def needs_widening(self) -> bool:
        """Whether GPU kernels need `widen` first: for 5 and 6 bits, and 8 bits with one factor for each group."""
        in_bytes = self.quants.dtype == torch.int8
        return self.high_bits is not None or (in_bytes and self.group_scales is not None and not self.has_halves)

    @property
    def has_halves(self) -> bool:
        """Whether each half of a group has a factor of its own."""
        return self.group_scales is not None and self.group_scales.dtype == torch.int8

    @property
    def is_simple(self) -> bool:
        """Whether each group has its own scale (no `group_scales`) and no bits are stored apart (no `high_bits`)."""
        return self.high_bits is None and self.group_scales is None

    def rows(self, index: Tensor | slice) -> "PackedWeight":
        """Return the selected rows; with a slice, they share memory with this weight."""
        return self.map(lambda tensor: tensor[index])

    def to(self, device: torch.device | str | None) -> "PackedWeight":
        """Return the same weight on another device; None leaves it where it is."""
        return self.map(lambda tensor: tensor.to(device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "PackedWeight":
        """Return a weight with the results of a function of each tensor."""
        return packed_from_tensors({name: function(tensor) for name, tensor in self.tensors.items()}, self.columns)

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize to (N, K), a chunk of rows at a time to keep temporary memory small."""
        weight = torch.empty(self.shape, dtype=dtype, device=self.quants.device)
        for rows in _row_chunks(weight):
            weight[rows] = self.rows(rows).dequantize()
        return weight

    def dequantize(self) -> Tensor:
        """Return scale · quant + offset in float32, all rows at once."""
        if not self.is_simple:
            return dequantize_blocks(self)
        values = self.integers().unflatten(-1, (-1, GROUP_SIZE)).float() * self.scales.float()[..., None]
        if self.offsets is not None:
            values += self.offsets.float()[..., None]
        return values.flatten(-2)[..., : self.columns]

    def integers(self) -> Tensor:
        """Return the quants as (N, K) int8, centered on zero if there are no offsets."""
        if self.quants.dtype == torch.int8:
            return self.quants
        groups = self.quants.unflatten(-1, (-1, GROUP_SIZE // 2))
        quants = torch.cat((groups & 15, groups >> 4), dim=-1).flatten(-2).to(torch.int8)
        return quants if self.offsets is not None else quants - 8


def packed_from_tensors(tensors: Mapping[str, Tensor], columns: int) -> PackedWeight:
    """Return the packed weight with these tensors; a name of PACKED_PARTS that is missing stands for None."""
    return PackedWeight(**{"offsets": None, **tensors}, columns=columns)  # type: ignore[arg-type]


def _row_chunks(matrix: Tensor, max_elements: int | None = None) -> list[slice]:
    """Divide the rows of a matrix into slices of at most `max_elements` values, by default ELEMENTS_PER_CHUNK."""
    rows_per_chunk = max(1, (max_elements or ELEMENTS_PER_CHUNK) // matrix.shape[1])
    return [slice(start, start + rows_per_chunk) for start in range(0, len(matrix), rows_per_chunk)]


def pack(weight: Tensor, bits: Bits, dtype: torch.dtype | None = None) -> PackedWeight:
    """Quantize a matrix (N, K), or experts (E, N, K) as E · N rows, to the nearest of 255 or 16 levels per group.

    With 16 levels, scale and offset are chosen by weighted least squares. With `dtype`, the values are rounded to it
    first, a few rows at a time.
    """
    rows = weight.flatten(0, -2)
    # The result is allocated first: temporary tensors below it would leave holes in the heap when they are freed.
    packed = _empty_packed_weight(len(rows), weight.shape[-1], bits, weight.device)
    for chunk in _row_chunks(rows, ELEMENTS_PER_CHUNK // 8):  # packing takes several temporary tensors
        source, target = _pack_rows(rows[chunk].to(dtype=dtype), bits), packed.rows(chunk)
        target.quants.copy_(source.quants)
        target.scales.copy_(source.scales)
        if source.offsets is not None and target.offsets is not None:
            target.offsets.copy_(source.offsets)
    return packed


def _empty_packed_weight(num_rows: int, columns: int, bits: Bits, device: torch.device) -> PackedWeight:
    """Allocate a packed weight without setting its values."""
    num_groups = 2 * -(-columns // (2 * GROUP_SIZE))
    scales = torch.empty(num_rows, num_groups, dtype=torch.float16, device=device)
    if bits == "int8":
        quants = torch.empty(num_rows, num_groups * GROUP_SIZE, dtype=torch.int8, device=device)
        return PackedWeight(quants, scales, None, columns)
    quants = torch.empty(num_rows, num_groups * GROUP_SIZE // 2, dtype=torch.uint8, device=device)
    return PackedWeight(quants, scales, torch.empty_like(scales), columns)


def _pack_rows(weight: Tensor, bits: Bits) -> PackedWeight:
    if not weight.isfinite().all():
        raise ClearheadError("a weight is NaN or infinite and cannot be quantized; the checkpoint is damaged")
    groups = functional.pad(weight.float(), (0, -weight.shape[1] % (2 * GROUP_SIZE))).unflatten(-1, (-1, GROUP_SIZE))
    if bits == "int8":
        scales = to_float16(groups.abs().amax(dim=-1) / 127)
        quants = (groups / divisors(scales)).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        return PackedWeight(quants, scales, None, weight.shape[1])
    # The offset lets all 16 levels cover the group's own range, and reproduces weights that came from such blocks.
    grid = fit_quickly(groups)
    scales, offsets = to_float16(grid.scales[..., 0]), to_float16(grid.offsets[..., 0])
    quants = ((groups - offsets.float()[..., None]) / divisors(scales)).round().clamp(0, 15).to(torch.uint8)
    return PackedWeight(_pack_nibbles(quants), scales, offsets, weight.shape[1])


def _pack_nibbles(quants: Tensor) -> Tensor:
    """Store two 4-bit values per byte: (..., G, 32) -> (..., G · 16)."""
    return (quants[..., : GROUP_SIZE // 2] | (quants[..., GROUP_SIZE // 2 :] << 4)).flatten(-2)


def pack_quants(
    quants: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    *,
    group_scales: Tensor | None = None,
    group_offsets: Tensor | None = None,
    has_fifth_bits: bool = False,
) -> PackedWeight:
    """Store integers (N, K) with scales and offsets (N, K / 32) in float16: int8, or 4 or 5 bits in uint8.

    Without offsets, a quant q of 4 bits stands for q - 8, and of 5 bits for q - 16. With integers of groups, which
    multiply them, scales and offsets are (N, K / 256).
    """
    columns = quants.shape[1]
    missing = -columns % (2 * GROUP_SIZE)
    groups = missing // GROUP_SIZE
    quants, scales = functional.pad(quants, (0, missing)), functional.pad(scales, (0, groups))
    offsets = None if offsets is None else functional.pad(offsets, (0, groups))
    high_bits = None
    if quants.dtype == torch.uint8:
        in_groups = quants.unflatten(-1, (-1, GROUP_SIZE))
        high_bits = arrange_bits(in_groups >> 4) if has_fifth_bits else None
        quants = _pack_nibbles(in_groups & 15)
    return PackedWeight(
        quants.contiguous(), scales.contiguous(), offsets, columns, high_bits, group_scales, group_offsets
    )


def to_float16(scales: Tensor) -> Tensor:
    """Return scales or offsets in float16; raise ClearheadError if one is too large."""
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

    `block_type` is one of KEPT_BLOCK_TYPES.
    """
    if block_type not in NATIVE_BLOCK_TYPES:
        tensors, columns = split_blocks(blocks, rows, block_type)
        return packed_from_tensors(tensors, columns)
    blocks = blocks.view(rows, -1, blocks.shape[-1])
    columns = blocks.shape[1] * GROUP_SIZE
    if blocks.shape[1] % 2:
        blocks = functional.pad(blocks, (0, 0, 0, 1))
    quants_start = 4 if block_type == "Q4_1" else 2
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    offsets = blocks[..., 2:4].contiguous().view(torch.float16)[..., 0] if block_type == "Q4_1" else None
    quants = blocks[..., quants_start:].flatten(-2)
    return PackedWeight(quants.view(torch.int8) if block_type == "Q8_0" else quants, scales, offsets, columns)


def is_consistent(packed: PackedWeight) -> bool:
    """Return whether the tensors of a weight have dtypes and shapes that belong together."""
    tensors, quants, columns = packed.tensors, packed.quants, packed.columns
    if any(tensor.ndim != 2 or len(tensor) != len(quants) or not tensor.numel() for tensor in tensors.values()):
        return False
    if quants.dtype not in (torch.int8, torch.uint8) or any(
        tensors[name].dtype != torch.float16 for name in ("scales", "offsets") if name in tensors
    ):
        return False
    groups = packed.num_groups
    if groups % 2 or not 0 < columns <= groups * GROUP_SIZE < columns + 2 * GROUP_SIZE:
        return False
    found = {name: (tensor.dtype, tensor.shape[1]) for name, tensor in tensors.items()}
    return found in _known_shapes(groups)


def _known_shapes(groups: int) -> list[dict[str, tuple[torch.dtype, int]]]:
    """Return dtype and width of all tensors, for each format, of rows with this many groups."""
    int8, uint8, half = torch.int8, torch.uint8, torch.float16
    low, scales, offsets = {"quants": (uint8, groups * 16)}, {"scales": (half, groups)}, {"offsets": (half, groups)}
    fifth = {"high_bits": (uint8, -(-groups // 4) * 16)}
    simple = [{"quants": (int8, groups * 32)} | scales, low | scales, low | scales | offsets]
    simple.append(simple[0] | offsets)
    known = [*simple, low | scales | fifth, low | scales | offsets | fifth]
    if groups % 8:
        return known
    block_scales, block_offsets = {"scales": (half, groups // 8)}, {"offsets": (half, groups // 8)}
    levels = {"group_scales": (uint8, groups)} | block_scales
    level_offsets = {"group_offsets": (uint8, groups)} | block_offsets
    halves = {"group_scales": (int8, 2 * groups)} | block_scales
    half_offsets = {"group_offsets": (int8, 2 * groups)} | block_offsets
    known += [low | levels | level_offsets, low | levels | level_offsets | fifth, simple[0] | levels]
    known += [low | halves, low | halves | half_offsets, low | halves | {"high_bits": (uint8, groups * 8)}]
    in_bytes = simple[0] | halves
    return [*known, in_bytes, in_bytes | level_offsets, in_bytes | half_offsets]
