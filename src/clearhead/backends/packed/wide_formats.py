"""Formats for GPU kernels: quants of 5 and 6 bits are stored in 8 bits, and all values stay the same.

    wide = widen(packed); torch.equal(wide.unpack(), packed.unpack())

    Q5_0          value = scale * q                         q from -16 to 15: the format of Q8_0
    Q5_1          value = scale * q + offset                scale and offset for each group of 32
    Q5_K          value = scale * s * q + offset * m        s of each half of a group, m of a group
    Q6_K          value = scale * s * q                     q from -32 to 31
    IQ4_XS        value = scale * s * q                     q from -127 to 127

Weights of 4 bits stay as they are: a kernel reads two levels of scales. If matrices of different formats are to be
rows of one, `widen_all` gives them what all can have: group scales of half groups, offsets, and 8 bits if one has them.
"""

from collections.abc import Sequence

import torch

from clearhead.backends.packed.block_formats import unsigned_quants, zero_point
from clearhead.backends.packed.formats import PackedWeight, packed_from_tensors


def widen(packed: PackedWeight) -> PackedWeight:
    """Return a weight in a format that GPU kernels read; only those that `needs_widening` are changed."""
    return _in_bytes(packed) if packed.needs_widening else packed


def widen_all(weights: Sequence[PackedWeight]) -> list[PackedWeight] | None:
    """Return weights with blocks of 256 values in one format; None if there is none, or one is for CPU kernels only."""
    if any(weight.group_scales is None or weight.needs_widening for weight in weights):
        return None
    if any(weight.quants.dtype == torch.int8 for weight in weights):
        weights = [_in_bytes(weight) for weight in weights]
    weights = [_with_offsets(weight) for weight in weights]
    if not all(weight.offsets is not None and weight.offsets.isfinite().all() for weight in weights):
        return None
    if len({weight.format for weight in weights}) > 1:  # offsets of groups and of half groups
        weights = [_with_halves(weight, "group_offsets") for weight in weights]
    return list(weights)


def _in_bytes(packed: PackedWeight) -> PackedWeight:
    """Return a weight with quants of 8 bits, and group scales of half groups if there are any."""
    tensors = _with_halves(packed, "group_scales").tensors
    tensors.pop("high_bits", None)
    if packed.quants.dtype == torch.uint8:
        tensors["quants"] = unsigned_quants(packed).view(torch.int8) - zero_point(packed)
    return packed_from_tensors(tensors, packed.columns)


def _with_halves(packed: PackedWeight, name: str) -> PackedWeight:
    """Return a weight with the integers `name` for half groups: those of a group, 0 to 63, hold for both halves."""
    integers = packed.tensors.get(name)
    if integers is None or integers.dtype == torch.int8:
        return packed
    halves = integers.view(torch.int8).repeat_interleave(2, dim=1)
    return packed_from_tensors(packed.tensors | {name: halves}, packed.columns)


def _with_offsets(packed: PackedWeight) -> PackedWeight:
    """Return a weight with group scales of half groups and with offsets, which may be zeros."""
    packed = _with_halves(packed, "group_scales")
    if packed.offsets is not None:
        return packed
    tensors = packed.tensors
    if packed.quants.dtype == torch.uint8:  # scale * s * (q - zero) = scale * s * q - zero * scale * s
        tensors |= {"offsets": -zero_point(packed) * packed.scales, "group_offsets": tensors["group_scales"]}
    else:
        zeros = packed.scales.new_zeros(len(packed.scales), packed.num_groups, dtype=torch.uint8)
        tensors |= {"offsets": torch.zeros_like(packed.scales), "group_offsets": zeros}
    return packed_from_tensors(tensors, packed.columns)
