"""The Triton kernels as functions of tensors, each with the tiles that suit its shape.

y = multiply(x, Matrix(weight, None, None), norm=norm)        # (1, K) -> (1, N)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.model.attention import Attention
from clearhead.model.norms import RootMeanSquare
from clearhead.model.parts import Rope


@dataclass(frozen=True)
class Matrix:
    """(N, K) as it stands, or int8 with a scale for each row; bias (N,)."""

    values: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, bits: str | None) -> "Matrix":
        if bits is None:
            return Matrix(weight, None, bias)
        scales = weight.float().abs().amax(dim=1).clamp(min=1e-12) / 127
        return Matrix((weight.float() / scales[:, None]).round().to(torch.int8), scales, bias)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        return self.values if self.scales is None else (self.values * self.scales[:, None]).to(dtype)


def multiply(
    x: Tensor,
    matrix: Matrix,
    *,
    norm: RootMeanSquare | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(1, K) -> (1, N); with a residual in place of it."""
    from clearhead.fast.triton_kernels import multiply_row

    num_rows, columns = matrix.values.shape
    num_rows = num_rows // 2 if gated else num_rows
    y = x.new_empty(1, num_rows, dtype=dtype) if residual is None else residual
    block_rows, block_columns, num_warps, num_ahead = tiling(num_rows, columns, gated, matrix.values.element_size())
    nothing = x
    multiply_row[(-(-num_rows // block_rows),)](
        y, x, matrix.values,
        nothing if matrix.scales is None else matrix.scales,
        nothing if norm is None else norm.weight,
        nothing if matrix.bias is None else matrix.bias,
        nothing if residual is None else residual,
        num_rows, 0.0 if norm is None else norm.config.epsilon,
        K=columns, NORM=norm is not None, UNIT_OFFSET=norm is not None and norm.config.unit_offset, GATED=gated,
        ACTIVATION=activation, QUANTISED=matrix.scales is not None, BIAS=matrix.bias is not None,
        RESIDUAL=residual is not None, BLOCK_N=block_rows, BLOCK_K=block_columns, PDL=starts_early(x.device),
        STAGES=num_ahead, num_warps=num_warps, **early(x.device),
    )  # fmt: skip
    return y


def attend(
    projected: Tensor,
    attention: Attention,
    kept: tuple[Tensor, Tensor],
    position: Tensor,
    angles: tuple[Tensor, Tensor],
    states: Tensor,
    arrivals: Tensor,
    num_spans: int,
) -> Tensor:
    """(B, (N + 2K) H) -> (B, N H). kept: keys, values (B, K, capacity, H); angles: cosines, sines (capacity, pairs)."""
    from clearhead.fast.triton_kernels import attend_row

    config, batch, (keys, values), (cosine, sine) = attention.config, len(projected), kept, angles
    y = projected.new_empty(batch, config.num_heads * config.head_width)
    rope = config.position if isinstance(config.position, Rope) else None
    attend_row[(batch * config.num_kv_heads, num_spans)](
        y, states, arrivals, projected, keys, values, position, cosine, sine,
        keys.stride(0), keys.stride(1), attention.scale,
        N=config.num_heads, K=config.num_kv_heads, H=config.head_width,
        PAIRS=0 if rope is None else cosine.shape[1], NEIGHBOURS=rope is not None and rope.pairing == "interleaved",
        GROUP=16, SPANS=num_spans, BLOCK=32, PDL=starts_early(projected.device), num_warps=4,
        **early(projected.device),
    )  # fmt: skip
    return y


def tiling(num_rows: int, columns: int, gated: bool, element_bytes: int) -> tuple[int, int, int, int]:
    """Rows and columns of a program's tile, its warps, and how many tiles ahead it loads (0: the loop is unrolled).

    The best of 30 to 112 on an H200, for the shapes of Llama 1B and 8B.
    """
    if element_bytes == 1:
        if num_rows >= 65536:
            return 16, 256, 8, 4
        if gated:
            return 8, 256, 2, 3
        return (8, 512, 2, 4) if columns <= 4096 else (4, 1024, 2, 3)
    if gated:
        return 2, 2048, 2 if columns <= 2048 else 4, 0
    if columns <= 2048:
        return 8, 1024, 4, 0
    if columns <= 4096:
        return (8, 1024, 8, 0) if num_rows >= 65536 else (4, 2048, 4, 0)
    return (4, 1024, 2, 0) if columns <= 8192 else (4, 512, 1, 0)


def starts_early(device: torch.device) -> bool:
    """Programmatic dependent launch: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early(device: torch.device) -> dict[str, bool]:
    return {"launch_pdl": True} if starts_early(device) else {}
