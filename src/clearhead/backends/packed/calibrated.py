"""Round a weight so that its products with typical inputs change least (GPTQ, Frantar et al. 2022, algorithm 1).

    packed = pack_calibrated(weight, second_moments, "int4")       # (N, K), mean of x xᵀ over inputs x: (K, K)

The columns are rounded one after the other. The error of a column changes the output by error · x[k]; the columns that
are not rounded yet are moved so that they cancel as much of it as they can:

    W[:, j] -= error · C[k, j] / C[k, k]   for all j > k,     Cᵀ C = (E[x xᵀ] + damping)⁻¹,  C upper triangular

The scale and offset of a group of 32 columns are chosen when the loop arrives at it, by least squares weighted with
E[x²]. The result has the format of `pack`.
"""

import torch
from torch import Tensor

from clearhead.backends.packed.fitting import fit_offset
from clearhead.backends.packed.formats import GROUP_SIZE, Bits, PackedWeight, divisors, pack_quants, to_float16
from clearhead.errors import ClearheadError

_DAMPING = 0.01  # times the mean of the diagonal, as in the paper
_MAX_DAMPING = 1.0


def pack_calibrated(weight: Tensor, second_moments: Tensor, bits: Bits) -> PackedWeight:
    """Quantize a matrix (N, K) for inputs whose products x xᵀ have the means `second_moments` (K, K)."""
    values = weight.detach().float().clone()
    if not values.isfinite().all():
        raise ClearheadError("a weight is NaN or infinite and cannot be quantized; the checkpoint is damaged")
    factor = _inverse_factor(second_moments.float())
    importance = second_moments.diagonal().float().clamp(min=1e-12)
    quants, scales, offsets = [], [], []
    for start in range(0, values.shape[1], GROUP_SIZE):
        group = slice(start, min(start + GROUP_SIZE, values.shape[1]))
        group_values = values[:, group]
        scale, offset = _fit(group_values, importance[group], bits)
        group_quants, errors = _round_columns(group_values, scale, offset, factor[group, group], bits)
        values[:, group.stop :] -= errors @ factor[group, group.stop :]
        quants.append(group_quants)
        scales.append(scale)
        offsets.append(offset)
    all_offsets = torch.cat(offsets, dim=1) if bits == "int4" else None
    return pack_quants(torch.cat(quants, dim=1), torch.cat(scales, dim=1), all_offsets)


def _inverse_factor(second_moments: Tensor) -> Tensor:
    """Return the upper triangular C with Cᵀ C = (second moments + damping)⁻¹, each row divided by its diagonal element.

    The damping is increased until the matrix is positive definite: inputs that never occur or that depend on each other
    leave it singular.
    """
    identity = torch.eye(len(second_moments), device=second_moments.device)
    damping = _DAMPING
    while damping <= _MAX_DAMPING:
        damped = second_moments + damping * second_moments.diagonal().mean().clamp(min=1e-12) * identity
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed and upper.isfinite().all():
                return upper / upper.diagonal()[:, None]
        damping *= 10
    return identity  # no error is passed on: every column is rounded by itself


def _fit(values: Tensor, importance: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return scale and offset (N, 1) of a group (N, columns) in float16; the offset is 0 in 8 bits."""
    if bits == "int8":
        scale = to_float16(values.abs().amax(dim=1, keepdim=True) / 127)
        return scale, torch.zeros_like(scale)
    grid = fit_offset(values, importance.expand_as(values), 15)
    return to_float16(grid.scales), to_float16(grid.offsets)


def _round_columns(values: Tensor, scale: Tensor, offset: Tensor, factor: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Return the quants of a group (N, columns), and the error of each column after all earlier ones have moved it.

    Columns are handled as rows, which are contiguous in memory: that is five times as fast.
    """
    lowest, highest, dtype = (-127, 127, torch.int8) if bits == "int8" else (0, 15, torch.uint8)
    divisor, start = divisors(scale)[:, 0, 0], offset[:, 0].float()
    columns, step = values.T.contiguous(), scale[:, 0].float()
    quants, errors = torch.empty_like(columns), torch.empty_like(columns)
    for k in range(len(columns)):
        quants[k] = ((columns[k] - start) / divisor).round_().clamp_(lowest, highest)
        errors[k] = columns[k] - (quants[k] * step + start)
        columns[k + 1 :] -= factor[k, k + 1 :, None] * errors[k]
    return quants.T.to(dtype), errors.T
