"""The Triton kernels as functions of tensors, each with the tiles that suit its shape.

y = multiply(x, Matrix(weight, None), norm=norm)        # (1, K) -> (1, N)
"""

import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.architecture import HeadNorm, Rope, SlidingWindow
from clearhead.backends.packed.formats import Packed
from clearhead.model import Attention, RootMeanSquare

Norm = RootMeanSquare | nn.LayerNorm

MANY_ROWS = 8192
EVERYTHING = 1 << 30  # a window that no text fills


@dataclass(frozen=True)
class Matrix:
    """(N, K) as it stands or in few bits; bias (N,)."""

    weight: Tensor | Packed
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        weight = self.weight
        return weight.num_bytes if isinstance(weight, Packed) else weight.numel() * weight.element_size()

    def numbers(self, dtype: torch.dtype) -> Tensor:
        return self.weight.unpack(dtype) if isinstance(self.weight, Packed) else self.weight


def multiply(
    x: Tensor,
    matrix: Matrix,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = "",
) -> Tensor:
    """(B, K) -> (B, N), with a residual in place of it; a weight that is not packed takes one row."""
    from clearhead.backends.cuda.triton_products import multiply_packed_row, multiply_row

    weight = matrix.weight
    num_rows, columns = matrix.shape[0] // (2 if gated else 1), matrix.shape[1]
    y = x.new_empty(len(x), num_rows) if residual is None else residual
    gain, shift, epsilon, kind = None, None, 0.0, ""
    match norm:
        case RootMeanSquare():
            gain, epsilon, kind = norm.weight, norm.config.epsilon, "rms"
        case nn.LayerNorm():
            gain, shift, epsilon, kind = norm.weight, norm.bias, norm.eps, "layer"
    ends = *(x if part is None else part for part in (gain, shift, matrix.bias, residual)), num_rows, epsilon
    about: dict[str, Any] = {
        "K": columns, "NORM": kind, "UNIT_OFFSET": isinstance(norm, RootMeanSquare) and norm.config.unit_offset,
        "NORM_BIAS": shift is not None, "GATED": gated, "ACTIVATION": activation, "BIAS": matrix.bias is not None,
        "RESIDUAL": residual is not None,
    } | early(x.device)  # fmt: skip
    if isinstance(weight, Packed):
        bits = 8 if weight.quants.dtype == torch.int8 else 4
        offsets = weight.scales if weight.offsets is None else weight.offsets
        tile = packed_tiling(num_rows, weight.scales.shape[1])
        most = num_processors(x.device) * (4 if num_rows >= MANY_ROWS else 2)
        multiply_packed_row[min(-(-num_rows // tile["BLOCK_N"]), most), len(x)](
            y, x, weight.quants.view(torch.int32), weight.scales, offsets, *ends,
            GROUPS=weight.scales.shape[1], BITS=bits, OFFSETS=weight.offsets is not None, DP4A=x.is_cuda,
            **about, **tile,
        )  # fmt: skip
    else:
        tile = tiling(num_rows, columns, gated)
        assert len(x) == 1, "PyTorch's product is faster for several rows"
        multiply_row[(-(-num_rows // tile["BLOCK_N"]),)](y, x, weight, *ends, **about, **tile)
    return y


def attend(
    projected: Tensor,
    attention: Attention,
    kept: tuple[Tensor, Tensor],
    position: Tensor,
    angles: tuple[Tensor, Tensor],
    workspace: tuple[Tensor, Tensor],
) -> Tensor:
    """(B, (N + 2K) H) -> (B, N H). kept: keys, values (B, K, capacity, H); angles: cosines, sines (capacity, pairs);
    workspace: from `attention_workspace`."""
    from clearhead.backends.cuda.triton_attention import attend_row

    config, (keys, values), (states, arrivals) = attention.config, kept, workspace
    y = projected.new_empty(len(projected), config.num_heads * config.head_width)
    rope = config.position if isinstance(config.position, Rope) else None
    norm = config.head_norm.norm if isinstance(config.head_norm, HeadNorm) else None
    norms = (y, y) if norm is None else (attention.query_norm.weight, attention.key_norm.weight)
    attend_row[states.shape[:2]](
        y, states, arrivals, projected, keys, values, position, *angles, *norms,
        keys.stride(0), keys.stride(1), config.pattern.size if isinstance(config.pattern, SlidingWindow) else EVERYTHING,
        attention.scale, 0.0 if norm is None else norm.epsilon,
        N=config.num_heads, K=config.num_kv_heads, H=config.head_width,
        PAIRS=0 if rope is None else angles[0].shape[1], NEIGHBOURS=rope is not None and rope.pairing == "interleaved",
        NORMED=norm is not None, UNIT_OFFSET=int(norm is not None and norm.unit_offset),
        GROUP=states.shape[2], SPANS=states.shape[1], BLOCK=32, num_warps=4, **early(projected.device),
    )  # fmt: skip
    return y


def attention_workspace(attention: Attention, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the spans of a head leave for the last of them to join (programs, spans, GROUP, H + 2), and how many did."""
    config, programs = attention.config, batch * attention.config.num_kv_heads
    # Enough programs for every multiprocessor of the largest GPUs, and no more: each span is joined at a price.
    num_spans = max(1, min(16, 128 // programs))
    states = torch.empty(programs, num_spans, 16, config.head_width + 2, dtype=torch.float32, device=device)
    return states, torch.zeros(programs, dtype=torch.int32, device=device)


def tiling(num_rows: int, columns: int, gated: bool) -> dict[str, int]:
    """Rows and columns of a program's tile, and its warps: the best of 30 on an H200, for shapes of Llama 1B and 8B."""
    if gated:
        rows, block, warps = 2, 2048, 2 if columns <= 2048 else 4
    elif columns <= 2048:
        rows, block, warps = 8, 1024, 4
    elif columns <= 4096:
        rows, block, warps = (8, 1024, 8) if num_rows >= 65536 else (4, 2048, 4)
    else:
        rows, block, warps = (4, 1024, 2) if columns <= 8192 else (4, 512, 1)
    return {"BLOCK_N": rows, "BLOCK_K": block, "num_warps": warps}


def packed_tiling(num_rows: int, num_groups: int) -> dict[str, int]:
    """The same for weights in few bits, where a tile is as wide as the matrix."""
    block = 1 << (num_groups - 1).bit_length()
    tile_groups = 512 if num_rows >= MANY_ROWS else 1024
    return {"BLOCK_N": max(2, tile_groups // block), "BLOCK_G": block, "num_warps": 4 if block <= 128 else 8}


@lru_cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def triton_runs(device: torch.device) -> bool:
    """Whether Triton is there, has the C compiler that it calls, and knows the GPU: Volta and later."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    found = find_spec("triton") is not None and compiler is not None
    return found and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0)


def early(device: torch.device) -> dict[str, bool]:
    """Programmatic dependent launch: Hopper and later."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if can else {"PDL": False}
