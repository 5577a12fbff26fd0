"""Weights as structures of the C++ kernels.

    matrix = describe_matrix(weight, bias)

A structure holds addresses only: whoever keeps it must keep the tensors it points to.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.backends.cpu_kernels.structures import MatrixStruct
from clearhead.backends.packed import PackedWeight

# Codes of the C++ enum WeightKind.
WEIGHT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
_FIVE_BITS_CODE, _SIX_BITS_CODE, _FOUR_BITS_OF_HALVES_CODE, _PARTS_CODE = 4, 5, 6, 7


def describe_matrix(weight: Tensor | PackedWeight, bias: Tensor | None = None) -> MatrixStruct:
    """Return the structure for a contiguous weight (N, K) and a float32 bias (N,)."""
    bias_address = None if bias is None else bias.data_ptr()
    if isinstance(weight, Tensor):
        kind = WEIGHT_CODES[weight.dtype]
        return MatrixStruct(kind, 0, *weight.shape, weight.data_ptr(), None, None, bias_address)
    return MatrixStruct(
        _packed_code(weight),
        weight.num_groups,
        *weight.shape,
        weight.quants.data_ptr(),
        weight.scales.data_ptr(),
        _address(weight.offsets),
        bias_address,
        _address(weight.high_bits),
        _address(weight.group_scales),
        _address(weight.group_offsets),
    )


def _packed_code(weight: PackedWeight) -> int:
    """Return the code of a packed format."""
    assert not weight.is_wide, "only GPU kernels read this format"
    if weight.high_bits is None:
        return _FOUR_BITS_OF_HALVES_CODE if weight.has_halves else WEIGHT_CODES[weight.quants.dtype]
    return _SIX_BITS_CODE if weight.has_halves else _FIVE_BITS_CODE


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def describe_parts(weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> tuple[MatrixStruct, object]:
    """Return the structure for the rows of several packed weights (N, K) with different formats, and its parts.

    The parts must be kept as long as the structure.
    """
    parts = (MatrixStruct * len(weights))(*map(describe_matrix, weights, biases))
    num_rows = sum(weight.shape[0] for weight in weights)
    matrix = MatrixStruct(
        _PARTS_CODE, weights[0].num_groups, num_rows, weights[0].shape[1], ctypes.addressof(parts), None, None, None
    )
    return matrix, parts
