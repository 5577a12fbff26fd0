"""Quantize weights to the block formats of GGUF files.

    blocks = quantize(weight, "Q4_K", importance)      # (N, K) -> (N, bytes) uint8

The scale and offset of each group of values are chosen by weighted least squares (backends/packed/fitting.py). A K
format then rounds the scales of a block to 6 or 8 bits, and the quants are computed again for the rounded scales.

The weight of an error is importance · sqrt(mean square of the block + value²): large values matter more. `importance`
is the mean square of the inputs of each column on a text (`importance.py`), or 1. Layouts: gguf_blocks.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.backends import fit_offset, fit_symmetric, inverse
from clearhead.errors import ClearheadError

_VALUES_PER_CHUNK = 1 << 20  # quantized at a time, which bounds the temporary memory


def quantize(weight: Tensor, block_type: str, importance: Tensor | None = None) -> Tensor:
    """Return the blocks of a matrix (N, K) as (N, bytes of a row) uint8; plain types become their bytes.

    K must be a multiple of the block size. `importance` (K,) are weights of the columns.
    """
    if block_type in _PLAIN_TYPES:
        return weight.to(_PLAIN_TYPES[block_type]).contiguous().view(torch.uint8)
    encode, block_size = _ENCODERS[block_type]
    columns = weight.shape[1]
    assert columns % block_size == 0
    rows_per_chunk = max(1, _VALUES_PER_CHUNK // columns)
    chunks = []
    for rows in weight.split(rows_per_chunk):
        values = rows.float()
        if not values.isfinite().all():
            raise ClearheadError("a weight is NaN or infinite and cannot be quantized; the checkpoint is damaged")
        blocks = values.reshape(-1, block_size)
        per_column = torch.ones(columns) if importance is None else importance.float()
        weights = per_column.expand(len(rows), columns).reshape(-1, block_size)
        weights = weights * (blocks.square().mean(dim=1, keepdim=True) + blocks.square()).sqrt()
        chunks.append(encode(blocks, weights).reshape(len(rows), -1))
    return torch.cat(chunks)


# --- formats with one scale for each 32 values


def _q8_0(x: Tensor, weights: Tensor) -> Tensor:
    scales = x.abs().amax(1, keepdim=True) / 127
    scaled = x * inverse(scales)
    quants = scaled.sign() * (scaled.abs() + 0.5).floor()  # halves away from zero, as llama.cpp rounds
    return torch.cat([_halves(scales), quants.to(torch.int8).view(torch.uint8)], dim=1)


def _q4_0(x: Tensor, weights: Tensor) -> Tensor:
    scales = _rounded(fit_symmetric(x, weights, -8, 7))
    quants = _round(x, scales, -8, 7) + 8
    return torch.cat([_halves(scales), _nibbles(quants, 16)], dim=1)


def _q5_0(x: Tensor, weights: Tensor) -> Tensor:
    scales = _rounded(fit_symmetric(x, weights, -16, 15))
    quants = _round(x, scales, -16, 15) + 16
    return torch.cat([_halves(scales), _bits(quants >> 4), _nibbles(quants & 15, 16)], dim=1)


def _q5_1(x: Tensor, weights: Tensor) -> Tensor:
    grid = fit_offset(x, weights, 31, below_zero=False)
    scales, offsets = _rounded(grid.scales), _rounded(grid.offsets)
    quants = _round(x - offsets, scales, 0, 31)
    return torch.cat([_halves(scales), _halves(offsets), _bits(quants >> 4), _nibbles(quants & 15, 16)], dim=1)


# --- formats with blocks of 256 values


def _with_minimums(x: Tensor, weights: Tensor, highest: int) -> tuple[list[Tensor], Tensor]:
    """Return the first 16 bytes of a Q4_K or Q5_K block, in parts, and the quants (blocks, 256)."""
    groups = x.unflatten(1, (8, 32))
    grid = fit_offset(groups, weights.unflatten(1, (8, 32)), highest, below_zero=True)
    scales, minimums = grid.scales[..., 0], -grid.offsets[..., 0]
    scale = _rounded(scales.amax(1, keepdim=True) / 63)
    minimum = _rounded(minimums.amax(1, keepdim=True) / 63)
    small_scales, small_minimums = _round(scales, scale, 0, 63), _round(minimums, minimum, 0, 63)
    offset = groups + (minimum * small_minimums)[..., None]
    quants = _round(offset, (scale * small_scales)[..., None], 0, highest).flatten(1)
    return [_halves(scale), _halves(minimum), _six_bits(small_scales, small_minimums)], quants


def _six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """Return eight scales and eight minimums of 6 bits as the twelve bytes of Q4_K and Q5_K."""
    high_scales, high_minimums = scales[:, 4:] >> 4 << 6, minimums[:, 4:] >> 4 << 6
    low = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return torch.cat([scales[:, :4] | high_scales, minimums[:, :4] | high_minimums, low], dim=1).to(torch.uint8)


def _q4_k(x: Tensor, weights: Tensor) -> Tensor:
    first, quants = _with_minimums(x, weights, 15)
    return torch.cat([*first, _nibbles(quants, 32)], dim=1)


def _q5_k(x: Tensor, weights: Tensor) -> Tensor:
    first, quants = _with_minimums(x, weights, 31)
    high = (quants >> 4).unflatten(1, (8, 32))
    planes = (high << torch.arange(8)[:, None]).sum(1).to(torch.uint8)
    return torch.cat([*first, planes, _nibbles(quants & 15, 32)], dim=1)


def _q6_k(x: Tensor, weights: Tensor) -> Tensor:
    groups = x.unflatten(1, (16, 16))
    scales = fit_symmetric(groups, weights.unflatten(1, (16, 16)), -32, 31)[..., 0]
    extreme = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    scale = _rounded(extreme / -128)
    small_scales = _round(scales, scale, -128, 127)
    quants = _round(groups, (scale * small_scales)[..., None], -32, 31).flatten(1) + 32
    two_bits = (quants >> 4).unflatten(1, (2, 4, 32)) << 2 * torch.arange(4)[:, None]
    high = two_bits.sum(2).flatten(1).to(torch.uint8)
    return torch.cat(
        [_nibbles(quants & 15, 64), high, small_scales.to(torch.int8).view(torch.uint8), _halves(scale)], dim=1
    )


# --- fields of a block


def _rounded(scales: Tensor) -> Tensor:
    """Return the scales as float16 stores them, in float32."""
    if scales.abs().max() > torch.finfo(torch.float16).max:
        raise ClearheadError(
            "the weights are too large for this type, because a scale exceeds the range of float16; use bf16"
        )
    return scales.to(torch.float16).float()


def _round(x: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    """Return the nearest quants as int32; a scale of 0 gives 0."""
    return (x * inverse(scales)).round().clamp(lowest, highest).to(torch.int32)


def _halves(scales: Tensor) -> Tensor:
    """(blocks, 1) -> (blocks, 2) uint8: a float16."""
    return scales.to(torch.float16).view(torch.uint8)


def _nibbles(quants: Tensor, distance: int) -> Tensor:
    """Store the values j and j + distance of each 2 · distance values in one byte."""
    pairs = quants.unflatten(1, (-1, 2, distance))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1).to(torch.uint8)


def _bits(quants: Tensor) -> Tensor:
    """(blocks, 32) of 0 or 1 -> (blocks, 4) bytes, low bits first."""
    return (quants.unflatten(1, (4, 8)) << torch.arange(8)).sum(2).to(torch.uint8)


_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENCODERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "Q8_0": (_q8_0, 32),
    "Q4_0": (_q4_0, 32),
    "Q5_0": (_q5_0, 32),
    "Q5_1": (_q5_1, 32),
    "Q4_K": (_q4_k, 256),
    "Q5_K": (_q5_k, 256),
    "Q6_K": (_q6_k, 256),
}
QUANTIZED_TYPES = tuple(_ENCODERS)
"""The block types that `quantize` computes, besides plain numbers."""
