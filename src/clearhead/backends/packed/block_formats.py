"""Weights of 5 and 6 bits, and of blocks of 256 values with two levels of scales, such as GGUF's Q5_0, Q4_K and Q6_K.

    tensors, columns = split_blocks(blocks, rows, "Q4_K"); tensors["group_scales"].shape      # (N, K / 32)

    Q5_0          value = scale * (q - 16)                  a scale for each group of 32
    Q5_1          value = scale * q + offset                scale and offset for each group of 32
    Q4_K, Q5_K    value = scale * s * q + offset * m        scale and offset of a block, s and m of a group, 0 to 63
    Q6_K          value = scale * s * (q - 32)              scale of a block, s of each half of a group, -128 to 127
    Q3_K          value = scale * s * (q - 8)               the same in 4 bits
    Q2_K          value = scale * s * q + offset * m        scale and offset of a block, s and m of each half of a group
    IQ4_XS        value = scale * s * q                     scale of a block, s of a group, q in 8 bits with a sign

The quants of the last three take fewer bits in a file, from which checkpoint/gguf_packing.py reads them.

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


def _split_q5(blocks: Tensor, block_type: str) -> dict[str, Tensor]:
    start = 4 if block_type == "Q5_1" else 2
    tensors = {"scales": _halves(blocks, 0), "quants": blocks[..., start + 4 :].flatten(1)}
    if block_type == "Q5_1":
        tensors["offsets"] = _halves(blocks, 2)
    return tensors | {"high_bits": arrange_bits(_bits(blocks[..., start : start + 4]))}


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
        tensors["high_bits"] = arrange_bits(planes.transpose(-2, -1).flatten(1, 2))
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


def arrange_bits(bits: Tensor) -> Tensor:
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
    quants = weight.quants if weight.quants.dtype == torch.int8 else unsigned_quants(weight)
    values = quants.float() - zero_point(weight)
    scales = weight.scales.float()[..., None]
    offsets = None if weight.offsets is None else weight.offsets.float()[..., None]
    if weight.group_scales is not None:
        # (N, blocks, groups or half groups of a block)
        scales = scales * weight.group_scales.unflatten(-1, (scales.shape[1], -1)).float()
        if offsets is not None and weight.group_offsets is not None:
            offsets = offsets * weight.group_offsets.unflatten(-1, (offsets.shape[1], -1)).float()
            # Wide formats may have scales of half groups and offsets of groups.
            offsets = offsets.repeat_interleave(scales.shape[2] // offsets.shape[2], dim=2)
    values = values.unflatten(-1, (*scales.shape[1:], -1)) * scales[..., None]
    if offsets is not None:
        values = values + offsets[..., None]
    return values.flatten(1)[:, : weight.columns]


def zero_point(weight: "PackedWeight") -> int:
    """Return the stored quant that stands for zero: offsets, and quants of 8 bits, need none in the middle."""
    if weight.offsets is not None or weight.quants.dtype == torch.int8:
        return 0
    return 8 if weight.high_bits is None else 32 if weight.has_halves else 16


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
