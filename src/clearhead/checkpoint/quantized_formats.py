"""Dequantize the weights of quantized Hugging Face folders: GPTQ, AWQ, compressed-tensors, bitsandbytes and float8.

    groups = gptq_groups(parts, bits=4, zero_shift=1); weight = groups.dequantize()      # (N, K) in float32

The integer formats share one form, value = scale * (quant - zero), where `scale` and `zero` belong to groups of columns
of a row. They differ in how the integers are packed into 32-bit words:

    GPTQ                     along the inputs: word k of a column holds the inputs 8 k ... 8 k + 7, low bits first
    AWQ                      along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
    compressed-tensors       along the inputs of a row, low bits first; a stored number is the quant plus 2^(bits - 1)

Sources: the packing of AutoGPTQ 0.7, of AutoAWQ 0.2, of compressed-tensors 0.9 and of bitsandbytes 0.45.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.errors import ClearheadError, require

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each group of 8 that bits 4 i ... 4 i + 3 of a word hold
_INT8_LEVELS = 127  # bitsandbytes: SCB is the largest magnitude of a row, which becomes 127
_WORD_BITS = 32
_MAX_DESCRIPTION_BYTES = 4096  # size of the JSON object that describes a 4-bit tensor of bitsandbytes

Parts = Mapping[str, Tensor]
"""The stored tensors of one matrix by the ends of their names, such as "qweight"."""


@dataclass(frozen=True)
class QuantGroups:
    """A matrix (N, K) as integers: value = scale * (quant - zero)."""

    quants: Tensor  # (N, K) uint8, or int8 if they have a sign
    scales: Tensor  # (N, G)
    zeros: Tensor | None  # (N, G) of the dtype of the quants; None: 0
    group_of_column: Tensor | None = None  # (K,) integers below G; None: groups of K / G consecutive columns

    def dequantize(self) -> Tensor:
        """Return the values (N, K) in float32."""
        columns = self.quants.shape[1]
        if self.group_of_column is None:
            size = -(-columns // self.scales.shape[1])
            groups = torch.arange(columns) // size
        else:
            groups = self.group_of_column
        values = self.quants.float()
        if self.zeros is not None:
            values -= self.zeros.float()[:, groups]
        return values * self.scales.float()[:, groups]


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """(N, W) int32 -> (N, W * 32 / bits) uint8, low bits first."""
    require(
        words.dtype == torch.int32 and words.ndim == 2, f"packed integers must be a matrix of int32, not {_say(words)}"
    )
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(1)


def gptq_groups(parts: Parts, *, bits: int, zero_shift: int) -> QuantGroups:
    """Return a matrix of GPTQ. Stored zeros are smaller by `zero_shift`: 1 in the format `gptq`, 0 in `gptq_v2`."""
    quants = _unpack_words(parts["qweight"].T.contiguous(), bits)  # stored (K / 8, N)
    scales = parts["scales"]
    zeros = _unpack_words(parts["qzeros"], bits) + zero_shift & (1 << bits) - 1  # (G, N)
    require(scales.is_floating_point() and scales.ndim == 2, f"scales must be a matrix of numbers, not {_say(scales)}")
    fits = scales.shape == zeros.shape == (len(scales), len(quants))
    require(fits and len(scales) > 0, f"qweight, qzeros and scales do not fit together: {_shapes(parts)}")
    columns, index = quants.shape[1], parts.get("g_idx")
    if index is not None:
        require(index.shape == (columns,) and index.dtype == torch.int32, f"g_idx does not fit: {_shapes(parts)}")
        require(bool(((index >= 0) & (index < len(scales))).all()), "g_idx names a group that does not exist")
        index = None if _is_regular(index, len(scales)) else index.long()
    if index is None:
        require(columns % len(scales) == 0, f"the inputs cannot be divided into groups: {_shapes(parts)}")
    return QuantGroups(quants, scales.T.contiguous(), zeros.T.contiguous(), index)


def _is_regular(index: Tensor, num_groups: int) -> bool:
    """Return whether the groups are equally long runs of columns."""
    if len(index) % num_groups:
        return False
    return torch.equal(index.long(), torch.arange(len(index)) // (len(index) // num_groups))


def awq_groups(parts: Parts) -> QuantGroups:
    """Return a matrix of AWQ (version gemm, 4 bits)."""
    quants, zeros = _awq_columns(parts["qweight"]), _awq_columns(parts["qzeros"])  # (K, N), (G, N)
    scales = parts["scales"]
    require(scales.is_floating_point() and scales.ndim == 2, f"scales must be a matrix of numbers, not {_say(scales)}")
    fits = scales.shape == zeros.shape and scales.shape[1] == quants.shape[1] and len(scales) > 0
    require(
        fits and len(quants) % len(scales) == 0, f"qweight, qzeros and scales do not fit together: {_shapes(parts)}"
    )
    return QuantGroups(quants.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous())


def _awq_columns(words: Tensor) -> Tensor:
    """Unpack words and put the eight integers of each in the order of the outputs."""
    places = torch.tensor(_AWQ_ORDER).argsort()
    return _unpack_words(words, 4).unflatten(1, (-1, 8))[..., places].flatten(1)


def packed_int_groups(parts: Parts, *, bits: int) -> QuantGroups:
    """Return a matrix of compressed-tensors in the format `pack-quantized`."""
    shape = parts["weight_shape"]
    require(shape.shape == (2,) and not shape.is_floating_point(), f"weight_shape does not fit: {_shapes(parts)}")
    num_rows, columns = (int(size) for size in shape)
    quants = _unpack_words(parts["weight_packed"], bits)
    width = -(-columns // (_WORD_BITS // bits)) * (_WORD_BITS // bits)
    require(quants.shape == (num_rows, width), f"weight_packed and weight_shape do not fit together: {_shapes(parts)}")
    center, zeros = 1 << bits - 1, parts.get("weight_zero_point")
    scales = _group_scales(parts["weight_scale"], num_rows, columns, parts)
    if zeros is not None:
        # packed along the rows; both the quants and the zeros are stored plus the center, which cancels
        zeros = _unpack_words(zeros.T.contiguous(), bits).T[:num_rows].contiguous()
        require(zeros.shape == scales.shape, f"weight_zero_point does not fit: {_shapes(parts)}")
    else:
        zeros = torch.full(scales.shape, center, dtype=torch.uint8)
    index = parts.get("weight_g_idx")
    if index is not None:
        require(
            index.shape == (columns,) and not index.is_floating_point(), f"weight_g_idx does not fit: {_shapes(parts)}"
        )
        require(
            bool(((index >= 0) & (index < scales.shape[1])).all()), "weight_g_idx names a group that does not exist"
        )
        index = index.long()
    return QuantGroups(quants[:, :columns].contiguous(), scales, zeros, index)


def plain_int_groups(parts: Parts) -> QuantGroups:
    """Return a matrix of compressed-tensors in the format `int-quantized`: int8 with scales."""
    quants, zeros = parts["weight"], parts.get("weight_zero_point")
    require(quants.dtype == torch.int8 and quants.ndim == 2, f"weight must be a matrix of int8, not {_say(quants)}")
    scales = _group_scales(parts["weight_scale"], quants.shape[0], quants.shape[1], parts)
    if zeros is not None:
        require(
            zeros.dtype == torch.int8 and zeros.numel() in (1, scales.numel()), f"zeros do not fit: {_shapes(parts)}"
        )
        zeros = zeros.reshape(-1, 1 if zeros.numel() == 1 else scales.shape[1]).expand(scales.shape)
    return QuantGroups(quants, scales, zeros)


def _group_scales(scales: Tensor, num_rows: int, columns: int, parts: Parts) -> Tensor:
    """Return the scales as (N, G): one for the whole tensor, for each row, or for each group of a row."""
    require(scales.is_floating_point() and scales.numel() > 0, f"weight_scale must hold numbers, not {_say(scales)}")
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(num_rows, 1)
    if scales.ndim == 1:
        scales = scales[:, None]
    fits = scales.ndim == 2 and len(scales) == num_rows and columns % scales.shape[1] == 0
    require(fits, f"weight_scale does not fit the weight: {_shapes(parts)}")
    return scales


def dequantize_float8(weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return weight * scale in float32: a scale for each block, or without blocks for each row or the whole tensor.

    Source: DeepSeek-V3 report, section 3.3.2.
    """
    fits = weight.ndim == 2 and weight.dtype == torch.float8_e4m3fn
    require(fits, f"only matrices of float8_e4m3fn can have scales for blocks, not {_say(weight)}")
    require(scales.is_floating_point() and scales.element_size() > 1, f"scales must be numbers, not {_say(scales)}")
    num_rows, columns = weight.shape
    if block is None:
        one_per_row = scales.numel() == num_rows and scales.shape[0] == num_rows
        require(scales.numel() == 1 or one_per_row, f"scales of shape {tuple(scales.shape)} do not fit {_say(weight)}")
        return weight.float() * scales.float().reshape(-1, 1)
    expected = (-(-num_rows // block[0]), -(-columns // block[1]))
    require(
        scales.shape == expected,
        f"its scales have shape {tuple(scales.shape)}; with blocks of {block[0]} x {block[1]}, it must be {expected}",
    )
    # A block may be larger than the matrix, and a hostile one would take all memory.
    by_row = scales.float().repeat_interleave(min(block[0], num_rows), 0)[:num_rows]
    return weight.float() * by_row.repeat_interleave(min(block[1], columns), 1)[:, :columns]


def dequantize_row_int8(weight: Tensor, largest: Tensor) -> Tensor:
    """Return the values of a matrix of bitsandbytes (LLM.int8): weight * SCB / 127, with SCB of each row."""
    require(weight.dtype == torch.int8 and weight.ndim == 2, f"weight must be a matrix of int8, not {_say(weight)}")
    fits = largest.shape == (len(weight),) and largest.dtype == torch.float32
    require(fits, f"SCB must have a float32 for each of the {len(weight)} rows, not {_say(largest)}")
    return weight.float() * (largest / _INT8_LEVELS)[:, None]


def dequantize_table_int4(parts: Parts) -> Tensor:
    """Return the values of a 4-bit tensor of bitsandbytes: an entry of a table times the largest magnitude of a block.

    The magnitudes may be quantized themselves, to 8 bits in blocks of 256 around an offset.
    """
    state = _int4_state(parts)
    weight, levels, magnitudes = parts["weight"], parts["weight.quant_map"], parts["weight.absmax"]
    shape, block = _sizes(state.get("shape")), state.get("blocksize")
    require(
        weight.dtype == torch.uint8 and levels.shape == (16,), f"weight or quant_map does not fit: {_shapes(parts)}"
    )
    require(shape is not None and 2 * weight.numel() == math.prod(shape), f"the shape does not fit: {_shapes(parts)}")
    valid = isinstance(block, int) and not isinstance(block, bool) and 0 < block <= 1 << 16
    require(valid, f"the block size is {block!r:.40}")
    assert shape is not None
    assert isinstance(block, int)
    num_blocks = -(-math.prod(shape) // block)
    require(magnitudes.shape == (num_blocks,), f"absmax does not fit: {_shapes(parts)}")
    if "weight.nested_absmax" in parts:
        magnitudes = _nested_magnitudes(parts, state)
    require(magnitudes.dtype == torch.float32, f"absmax must be float32, not {_say(magnitudes)}")
    bytes_ = weight.flatten().int()
    values = levels.float()[torch.stack((bytes_ >> 4, bytes_ & 15), dim=-1).flatten()]  # the high half comes first
    values *= magnitudes.repeat_interleave(block)[: len(values)]
    return values.reshape(shape)


def _nested_magnitudes(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    magnitudes, table, outer = (parts[f"weight.{name}"] for name in ("absmax", "nested_quant_map", "nested_absmax"))
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    valid = isinstance(block, int) and not isinstance(block, bool) and 0 < block <= 1 << 16
    require(valid and isinstance(offset, float), "the nested block size or offset is missing")
    assert isinstance(block, int)
    assert isinstance(offset, float)
    fits = magnitudes.dtype == torch.uint8 and table.shape == (256,) and outer.shape == (-(-len(magnitudes) // block),)
    require(fits, f"the nested tensors do not fit: {_shapes(parts)}")
    return table.float()[magnitudes.int()] * outer.float().repeat_interleave(block)[: len(magnitudes)] + offset


def _int4_state(parts: Parts) -> Mapping[str, Any]:
    """Return the JSON object that bitsandbytes stores as a tensor of bytes."""
    stored = next(tensor for name, tensor in parts.items() if name.startswith("weight.quant_state."))
    require(
        stored.dtype == torch.uint8 and stored.numel() <= _MAX_DESCRIPTION_BYTES, "quant_state is not a description"
    )
    try:
        state = json.loads(bytes(stored.flatten().tolist()).decode())
    except (ValueError, RecursionError):
        raise ClearheadError("quant_state is not JSON") from None
    require(isinstance(state, dict), "quant_state is not a JSON object")
    return dict(state)


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return a list of one or two sizes as a tuple; None if it is something else."""
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        return None
    if any(not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 40 for size in value):
        return None
    return tuple(value)


def _say(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _shapes(parts: Parts) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in parts.items())
