"""Formats for GPU kernels: quants of 5 and 6 bits are stored in 8 bits, and all values stay the same.

    wide = widen(packed); torch.equal(wide.unpack(), packed.unpack())

    Q5_0          value = scale * q                         q from -16 to 15: the format of Q8_0
    Q5_1          value = scale * q + offset                scale and offset for each group of 32
    Q5_K          value = scale * s * q + offset * m        s of each half of a group, m of a group
    Q6_K          value = scale * s * q                     q from -32 to 31

Q4_K stays as it is: a kernel reads its two levels of scales. If matrices of different formats are to be rows of one,
`widen_all` gives them what the widest has: 8 bits, group scales of half groups, and offsets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.backends.packed.block_formats import unsigned_quants
from clearhead.backends.packed.formats import PackedWeight, packed_from_tensors


def widen(packed: PackedWeight) -> PackedWeight:
    """Return a weight whose quants of 5 or 6 bits are in 8 bits; others are returned as they are."""
    if packed.high_bits is None:
        return packed
    quants = unsigned_quants(packed).view(torch.int8)
    tensors = {name: tensor for name, tensor in packed.tensors.items() if name != "high_bits"}
    if packed.offsets is None:
        quants = quants - (16 if packed.group_scales is None else 32)
    return packed_from_tensors(tensors | {"quants": quants} | _half_scales(packed), packed.columns)


def widen_all(weights: Sequence[PackedWeight]) -> list[PackedWeight] | None:
    """Return weights with blocks of 256 values in one format, or None if one has other blocks."""
    if any(weight.group_scales is None for weight in weights):
        return None
    return [_with_offsets(weight) for weight in weights]


def _with_offsets(packed: PackedWeight) -> PackedWeight:
    packed = widen(packed)
    tensors = packed.tensors | _half_scales(packed)
    if packed.quants.dtype == torch.uint8:
        tensors["quants"] = unsigned_quants(packed).view(torch.int8)
    if packed.offsets is None:
        tensors["offsets"] = torch.zeros_like(packed.scales)
        num_groups = packed.quants.shape[1] // 32
        tensors["group_offsets"] = packed.scales.new_zeros(len(packed.scales), num_groups, dtype=torch.uint8)
    return packed_from_tensors(tensors, packed.columns)


def _half_scales(packed: PackedWeight) -> dict[str, Tensor]:
    """Return group scales of half groups; those of Q4_K and Q5_K, 0 to 63, hold for both halves."""
    scales = packed.group_scales
    if scales is None or scales.dtype == torch.int8:
        return {} if scales is None else {"group_scales": scales}
    return {"group_scales": scales.view(torch.int8).repeat_interleave(2, dim=1)}
