"""Matrix products with plain or packed weights: in the CPU kernels where they are faster, in PyTorch otherwise.

y = multiply(x, pack(weight, "int8"))      # (..., K) -> (..., N)
"""

from ctypes import byref

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.backends.cpu_kernels.library import is_inference, load_kernel_library
from clearhead.backends.cpu_kernels.matrices import WEIGHT_CODES, describe_matrix
from clearhead.backends.cpu_kernels.structures import NormStruct
from clearhead.backends.packed import PackedWeight


def multiply(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + bias: (..., K) · (N, K) -> (..., N).

    PyTorch computes the product if there are no kernels, a gradient may be needed, or many rows meet a plain weight.
    """
    values = weight.quants if isinstance(weight, PackedWeight) else weight
    on_cpu = x.device.type == values.device.type == "cpu" and values.dtype in WEIGHT_CODES
    on_cpu = on_cpu and not (isinstance(weight, PackedWeight) and weight.is_wide)
    kernels = load_kernel_library() if on_cpu and is_inference() else None
    if kernels and (isinstance(weight, PackedWeight) or x.numel() <= kernels.clearhead_max_plain_rows() * x.shape[-1]):
        return multiply_in_kernel(x, weight, bias).to(x.dtype)
    if isinstance(weight, PackedWeight):
        weight = unpack(weight, x.dtype)
    return functional.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def multiply_in_kernel(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Return x Wᵀ + bias in float32, always computed by the kernel."""
    kernels = load_kernel_library()
    assert kernels is not None
    assert x.shape[-1] == weight.shape[1], "the kernel reads as many values of x as a row of W has"
    rows = x.float().contiguous().view(-1, x.shape[-1])
    float_bias = None if bias is None else bias.float().contiguous()
    weight = weight.contiguous() if isinstance(weight, Tensor) else weight
    y = rows.new_empty(len(rows), weight.shape[0])
    matrix, no_norm = describe_matrix(weight, float_bias), NormStruct()
    kernels.clearhead_linear(y.data_ptr(), rows.data_ptr(), len(rows), byref(matrix), byref(no_norm), 0, 0, None)
    return y.view(*x.shape[:-1], weight.shape[0])


def unpack(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize to (N, K), in the kernel if it can."""
    kernel_may_run = packed.quants.device.type == "cpu" and not packed.is_wide and not torch.compiler.is_compiling()
    kernels = load_kernel_library() if kernel_may_run else None
    if kernels is None or dtype not in (torch.float32, torch.bfloat16):
        return packed.unpack(dtype)
    y = torch.empty(packed.shape, dtype=dtype, device="cpu")
    kernels.clearhead_unpack(y.data_ptr(), byref(describe_matrix(packed)), dtype == torch.bfloat16)
    return y
