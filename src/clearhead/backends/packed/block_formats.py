"""Weights of 5 and 6 bits, and of blocks of 256 values with two levels of scales: GGUF's Q5_0, Q5_1, Q4_K, Q5_K, Q6_K.

    tensors, columns = split_blocks(blocks, rows, "Q4_K"); tensors["group_scales"].shape      # (N, K / 32)

    Q5_0          value = scale * (q - 16)                  a scale for each group of 32
    Q5_1          value = scale * q + offset                scale and offset for each group of 32
    Q4_K, Q5_K    value = scale * s * q + offset * m        scale and offset of a block, s and m of a group, 0 to 63
    Q6_K          value = scale * s * (q - 32)              scale of a block, s of each half of a group, -128 to 127

The low 4 bits of the quants are stored as in 4-bit formats: byte j of a group holds its values j and j + 16, which are
its first and second half. `high_bits` holds the others in the order in which a kernel needs them, for four groups at a
time. With value p of the four first (or second) halves, 0 <= p < 64:

    5 bits    16 bytes: bit p of a 64-bit word for the first halves, then one for the second halves
    6 bits    32 bytes: byte b holds the first halves b and b + 32, then the second halves b and b + 32, 2 bits each

Layouts of the stored blocks: checkpoint/gguf_blocks.py.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from clearhead.backends.packed.formats import PackedWeight

_GROUP_SIZE, _BLOCK_SIZE = 32, 256
_SHIFTS = torch.arange(8, dtype=torch.uint8)


def split_blocks(blocks: Tensor, rows: int, block_type: str) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a PackedWeight for GGUF blocks (num_blocks, bytes) uint8, and the number of columns."""
    blocks = blocks.view(rows, -1, blocks.shape[-1])
    split = {"Q4_K": _split_k, "Q5_K": _split_k, "Q6_K": _split_q6_k}.get(block_type, _split_q5)
    block_size = _BLOCK_SIZE if block_type.endswith("_K") else _GROUP_SIZE
    columns = blocks.shape[1] * block_size
    if block_size == _GROUP_SIZE and blocks.shape[1] % 2:
        blocks = functional.pad(blocks, (0, 0, 0, 1))
    return split(blocks, block_type), columns


def split_five_bits(quants: Tensor) -> dict[str, Tensor]:
    """Return quants (N, groups, 32) from 0 to 31 as the tensors that hold their low 4 bits and their fifth bits."""
    return {"quants": _join_nibbles(quants & 15), "high_bits": _arrange_bits(quants >> 4)}


def _split_q5(blocks: Tensor, block_type: str) -> dict[str, Tensor]:
    start = 4 if block_type == "Q5_1" else 2
    tensors = {"scales": _halves(blocks, 0), "quants": blocks[..., start + 4 :].flatten(1)}
    if block_type == "Q5_1":
        tensors["offsets"] = _halves(blocks, 2)
    return tensors | {"high_bits": _arrange_bits(_bits(blocks[..., start : start + 4]))}


def _split_k(blocks: Tensor, block_type: str) -> dict[str, Tensor]:
    packed = blocks[..., 4:16].unflatten(-1, (3, 4))
    low, high, nibbles = packed.unbind(-2)  # scales, minimums, and the low bits of those of the last four groups
    tensors = {
        "scales": _halves(blocks, 0),
        "offsets": -_halves(blocks, 2),
        "group_scales": torch.cat([low & 63, low >> 6 << 4 | nibbles & 15], dim=-1).flatten(1),
        "group_offsets": torch.cat([high & 63, high >> 6 << 4 | nibbles >> 4], dim=-1).flatten(1),
    }
    if block_type == "Q5_K":
        planes = blocks[..., 16:48, None] >> _SHIFTS & 1  # (N, blocks, 32, 8): bit g is that of group g
        tensors["high_bits"] = _arrange_bits(planes.transpose(-2, -1).flatten(1, 2))
    return tensors | {"quants": _regroup_nibbles(blocks[..., -128:])}


def _split_q6_k(blocks: Tensor, block_type: str) -> dict[str, Tensor]:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.cat([low & 15, low >> 4], dim=-1).flatten(1)  # (N, K)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> 2 * _SHIFTS[:4, None] & 3
    return {
        "scales": _halves(blocks, 208),
        "group_scales": blocks[..., 192:208].flatten(1).contiguous().view(torch.int8),
        "quants": _join_nibbles(low.unflatten(-1, (-1, _GROUP_SIZE))),
        "high_bits": _arrange_pairs(high.reshape(len(blocks), -1, _GROUP_SIZE)),
    }


def _halves(blocks: Tensor, byte: int) -> Tensor:
    """Return the float16 at `byte` of every block, (N, blocks)."""
    return blocks[..., byte : byte + 2].contiguous().view(torch.float16)[..., 0]


def _bits(packed: Tensor) -> Tensor:
    """(N, groups, 4) bytes -> (N, groups, 32) of 0 or 1, low bits first."""
    return (packed[..., None] >> _SHIFTS & 1).flatten(-2)


def _regroup_nibbles(packed: Tensor) -> Tensor:
    """(N, blocks, 128), byte j of 32 has values j and j + 32 -> (N, bytes), byte j of 16 has values j and j + 16."""
    stored = packed.unflatten(-1, (4, 32))
    return _join_nibbles(torch.stack([stored & 15, stored >> 4], dim=-2).flatten(1, 3))


def _join_nibbles(quants: Tensor) -> Tensor:
    """(N, groups, 32) -> (N, bytes)."""
    return (quants[..., :16] | quants[..., 16:] << 4).flatten(1)


def _arrange_bits(bits: Tensor) -> Tensor:
    """(N, groups, 32) of 0 or 1 -> (N, bytes): the fifth bits of four groups in 16 bytes."""
    bits = functional.pad(bits, (0, 0, 0, -bits.shape[1] % 4))
    fours = bits.unflatten(1, (-1, 4)).unflatten(-1, (2, 16)).transpose(2, 3)  # (N, ., halves, 4, 16)
    return (fours.reshape(len(bits), -1, 8) << _SHIFTS).sum(-1, dtype=torch.uint8)


def _arrange_pairs(pairs: Tensor) -> Tensor:
    """(N, groups, 32) of 0 to 3 -> (N, bytes): the fifth and sixth bits of four groups in 32 bytes."""
    fours = pairs.unflatten(1, (-1, 4)).unflatten(-1, (2, 16)).transpose(2, 3)  # (N, ., halves, 4, 16)
    quarters = fours.reshape(len(pairs), -1, 4, 32)  # first halves 0-31 and 32-63, second halves 0-31 and 32-63
    return (quarters << 2 * _SHIFTS[:4, None]).sum(2, dtype=torch.uint8).flatten(1)


def dequantize_blocks(weight: "PackedWeight") -> Tensor:
    """Return the values of a weight with high bits or group scales in float32."""
    quants = (weight.quants if weight.quants.dtype == torch.int8 else unsigned_quants(weight)).float()
    scales = weight.scales.float()[..., None]
    if weight.group_scales is None:
        assert weight.high_bits is not None
        values = quants.unflatten(-1, (-1, _GROUP_SIZE))
        values = (values if weight.offsets is not None else values - 16) * scales
        values = values if weight.offsets is None else values + weight.offsets.float()[..., None]
        return values.flatten(-2)[..., : weight.columns]
    is_wide = weight.quants.dtype == torch.int8  # wide_formats.py: the quants are centered
    per_block = weight.group_scales.shape[1] // weight.scales.shape[1]
    scales = scales * weight.group_scales.unflatten(-1, (-1, per_block)).float()  # (N, blocks, groups of a block)
    values = quants.unflatten(-1, (*scales.shape[-2:], -1))
    if weight.offsets is None or weight.group_offsets is None:
        return ((values if is_wide else values - 32) * scales[..., None]).flatten(-3)
    offsets = weight.offsets.float()[..., None] * weight.group_offsets.unflatten(-1, (-1, 8)).float()
    if is_wide:  # a scale for each half of a group
        offsets = offsets.repeat_interleave(2, dim=-1)
    return (values * scales[..., None] + offsets[..., None]).flatten(-3)


def unsigned_quants(weight: "PackedWeight") -> Tensor:
    """Return the quants (N, K) uint8 of a weight with at least 4 bits, before they are centered."""
    groups = weight.quants.unflatten(-1, (-1, _GROUP_SIZE // 2))
    quants = torch.cat((groups & 15, groups >> 4), dim=-1)  # (N, groups, 32)
    if weight.high_bits is None:
        return quants.flatten(-2)
    shifts = _SHIFTS.to(groups.device)
    if weight.group_scales is not None and weight.group_scales.dtype == torch.int8:
        high = weight.high_bits.unflatten(-1, (-1, 1, 32)) >> 2 * shifts[:4, None] & 3
    else:
        high = weight.high_bits[..., None] >> shifts & 1
    fours = high.reshape(len(quants), -1, 2, 4, 16).transpose(2, 3).flatten(-2)  # (N, ., 4 groups, 32)
    return (quants | fours.flatten(1, 2)[:, : quants.shape[1]] << 4).flatten(-2)
