"""Store the blocks of a GGUF tensor in a format that the kernels multiply with, without a change of values.

    packed = pack_blocks(file.read_blocks(name), num_rows, block_type)      # None if a scale does not fit

Most block types are stored as they are (backends/packed). The quants of these take more bits than in a file, and those
of tables are looked up:

    type      bits in a file    in memory    stored as
    Q2_K      2.6               5.1          4 bits, with integers of half groups for scale and offset
    Q3_K      3.4               4.6          4 bits, with integers of half groups for the scale
    TQ1_0     1.7               4.5          4 bits: the format of Q4_0, as for TQ2_0 and Q1_0
    TQ2_0     2.1               4.5
    Q1_0      1.1               4.5
    MXFP4     4.3               5.5          5 bits: the format of Q5_0, because all levels are integers below 16
    IQ4_NL    4.5               8.5          8 bits: the format of Q8_0, because the levels reach from -127 to 113
    IQ4_XS    4.3               8.3          8 bits, with integers of groups for the scale

A scale of MXFP4 may be a power of two that float16 cannot represent. `pack_blocks` returns None for such a matrix.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.backends import KEPT_BLOCK_TYPES, PackedWeight, pack_gguf_blocks, pack_quants
from clearhead.checkpoint.gguf_blocks import BlockType
from clearhead.checkpoint.gguf_fields import BlockParts, Bytes, LevelParts

_VALUES_PER_CHUNK = 1 << 20  # that are converted at a time, which bounds the temporary memory
_GROUP_SIZE = 32


def pack_blocks(blocks: Bytes, num_rows: int, block_type: BlockType) -> PackedWeight | None:
    """Return the blocks (num_blocks, bytes) of a matrix as a packed weight, or None if a scale does not fit.

    `block_type` is one of STORED_BLOCK_TYPES.
    """
    if block_type.name in KEPT_BLOCK_TYPES:
        return pack_gguf_blocks(torch.from_numpy(blocks), num_rows, block_type.name)
    convert, layout = _CONVERTERS[block_type.name], block_type.layout
    assert not isinstance(layout, torch.dtype)
    blocks_per_row = len(blocks) // num_rows
    rows_per_chunk = max(1, _VALUES_PER_CHUNK // (blocks_per_row * block_type.values_per_block))
    whole: PackedWeight | None = None
    for start in range(0, num_rows, rows_per_chunk):
        rows = slice(start, min(start + rows_per_chunk, num_rows))
        part = convert(layout(blocks[rows.start * blocks_per_row : rows.stop * blocks_per_row]), rows.stop - rows.start)
        if part is None:
            return None
        if whole is None:
            whole = part.map(lambda tensor: tensor.new_empty(num_rows, tensor.shape[1]))
        target = whole.rows(rows).tensors
        for name, tensor in part.tensors.items():
            target[name].copy_(tensor)
    return whole


def _in_rows(numbers: NDArray[np.generic], num_rows: int) -> Tensor:
    """Return the numbers of blocks or groups as a matrix (num_rows, numbers per row)."""
    return torch.from_numpy(numbers).reshape(num_rows, -1)


def _float16_in_rows(numbers: NDArray[np.float32], num_rows: int) -> Tensor:
    """Return scales or offsets, which a file holds in float16, as a matrix (num_rows, numbers per row)."""
    return _in_rows(numbers, num_rows).to(torch.float16)


def _pack_half_groups(parts: BlockParts | LevelParts, num_rows: int) -> PackedWeight:
    """Store quants below 8 and groups of 16: Q2_K and Q3_K."""
    assert isinstance(parts, LevelParts)
    quants, offsets, group_offsets = _in_rows(parts.quants, num_rows), None, None
    if parts.block_offsets is None or parts.group_offsets is None:
        quants = quants + 8
    else:
        offsets = _float16_in_rows(parts.block_offsets, num_rows)
        group_offsets = _in_rows(parts.group_offsets, num_rows)
    return pack_quants(
        quants.view(torch.uint8),
        _float16_in_rows(parts.block_scales, num_rows),
        offsets,
        group_scales=_in_rows(parts.group_scales, num_rows),
        group_offsets=group_offsets,
    )


def _pack_large_levels(parts: BlockParts | LevelParts, num_rows: int) -> PackedWeight:
    """Store quants of 8 bits and groups of 32 whose integers have a sign, which moves to the quants: IQ4_XS."""
    assert isinstance(parts, LevelParts)
    signs = 1 - 2 * (parts.group_scales < 0).astype(np.int8)
    return pack_quants(
        _in_rows(parts.quants * signs[..., None], num_rows),
        _float16_in_rows(parts.block_scales, num_rows),
        None,
        group_scales=_in_rows(np.abs(parts.group_scales), num_rows).view(torch.uint8),
    )


def _pack_small_quants(parts: BlockParts | LevelParts, num_rows: int) -> PackedWeight:
    """Store quants from -1 to 1 in 4 bits; blocks have one scale: TQ1_0, TQ2_0 and Q1_0."""
    quants = _in_rows(parts.quants + 8, num_rows).view(torch.uint8)
    return pack_quants(quants, _scales_of_groups(parts, num_rows), None)


def _pack_table_values(parts: BlockParts | LevelParts, num_rows: int) -> PackedWeight:
    """Store quants of 8 bits; groups of 32 have one scale: IQ4_NL."""
    return pack_quants(_in_rows(parts.quants, num_rows), _scales_of_groups(parts, num_rows), None)


def _scales_of_groups(parts: BlockParts | LevelParts, num_rows: int) -> Tensor:
    """Return the scales of groups of 32 values, which may be those of a larger block."""
    assert isinstance(parts, BlockParts)
    return _float16_in_rows(parts.scales, num_rows).repeat_interleave(parts.quants.shape[2] // _GROUP_SIZE, dim=1)


def _pack_powers_of_two(parts: BlockParts | LevelParts, num_rows: int) -> PackedWeight | None:
    """Store quants from -12 to 12 in 5 bits, if float16 can represent the scales of all groups but zeros: MXFP4."""
    assert isinstance(parts, BlockParts)
    wanted = torch.from_numpy(parts.scales * parts.quants.any(axis=2, keepdims=True))
    scales = wanted.to(torch.float16)
    if not torch.equal(scales.float(), wanted):
        return None
    quants = _in_rows(parts.quants + 16, num_rows).view(torch.uint8)
    return pack_quants(quants, scales.reshape(num_rows, -1), None, has_fifth_bits=True)


_CONVERTERS: dict[str, Callable[[BlockParts | LevelParts, int], PackedWeight | None]] = {
    "Q2_K": _pack_half_groups,
    "Q3_K": _pack_half_groups,
    "IQ4_XS": _pack_large_levels,
    "TQ1_0": _pack_small_quants,
    "TQ2_0": _pack_small_quants,
    "Q1_0": _pack_small_quants,
    "IQ4_NL": _pack_table_values,
    "MXFP4": _pack_powers_of_two,
}
STORED_BLOCK_TYPES = (*KEPT_BLOCK_TYPES, *_CONVERTERS)
"""GGUF block types that stay packed in memory."""
