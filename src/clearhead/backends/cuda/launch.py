"""The Triton kernels as functions of tensors, with tile sizes that suit each shape.

y = fused_linear(x, Projection(weight, None), norm=norm)        # (1, K) -> (1, N)
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.architecture import SlidingWindow
from clearhead.backends.lowering import LoweredAttention
from clearhead.backends.lowering_norms import NormModule, lower_norm
from clearhead.backends.lowering_projections import PackedParts, Projection
from clearhead.backends.packed import PackedWeight

_LARGE_OUTPUT = 8192  # rows of W from which on the packed kernel prefers smaller tiles
_UNPACKED_ROWS, _UNPACKED_GROUPS = 4, 64  # the tile of a program that unpacks
_NO_WINDOW = 1 << 30  # a window that is larger than any text


def fused_linear(
    x: Tensor,
    projection: Projection,
    *,
    norm: NormModule | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    activation: str = "",
) -> Tensor:
    """Return activation(W norm(x) + bias), (B, K) -> (B, N), or add it to `residual` in place.

    With `gated`, the first half of W's rows is the gate: activation(gate) · up. A plain weight takes one row of x.
    """
    from clearhead.backends.cuda.triton_products import multiply_packed_row, multiply_row

    weight, settings = projection.weight, lower_norm(norm)
    num_outputs, num_inputs = projection.shape[0] // (2 if gated else 1), projection.shape[1]
    y = x.new_empty(len(x), num_outputs) if residual is None else residual
    gain, shift = (None, None) if settings is None else (settings.weight, settings.bias)
    vectors = (x if part is None else part for part in (gain, shift, projection.bias, residual))  # x if absent
    arguments = *vectors, num_outputs, 0.0 if settings is None else settings.epsilon
    options: dict[str, Any] = {
        "K": num_inputs, "NORM": "" if settings is None else settings.kind,
        "UNIT_OFFSET": settings is not None and settings.unit_offset, "NORM_BIAS": shift is not None,
        "GATED": gated, "ACTIVATION": activation, "BIAS": projection.bias is not None,
        "RESIDUAL": residual is not None,
    } | dependent_launch(x.device)  # fmt: skip
    if isinstance(weight, PackedWeight):
        tile, programs = _packed_tiling(num_outputs, weight.num_groups, weight.quants.dtype == torch.int8, gated)
        max_programs = programs * _num_multiprocessors(x.device)
        multiply_packed_row[min(-(-num_outputs // tile["BLOCK_N"]), max_programs), len(x)](
            y, x, *packed_arguments(weight), *arguments, DP4A=x.is_cuda, **packed_format(weight), **options, **tile
        )
    else:
        tile = _tiling(num_outputs, num_inputs, gated)
        assert len(x) == 1, "PyTorch's product is faster for several rows"
        multiply_row[(-(-num_outputs // tile["BLOCK_N"]),)](y, x, weight, *arguments, **options, **tile)
    return y


def packed_arguments(weight: PackedWeight) -> tuple[Tensor, ...]:
    """Return the tensors of a packed weight in the order of the kernel's arguments; absent ones are not read."""
    parts = (weight.offsets, weight.group_scales, weight.group_offsets)
    absent = weight.scales
    return weight.quants.view(torch.int32), weight.scales, *(absent if part is None else part for part in parts)


def packed_format(weight: PackedWeight) -> dict[str, int]:
    """Return the options by which the kernels know the format of a packed weight."""
    assert not weight.needs_widening, "only CPU kernels read this format"
    per_group = 0 if weight.offsets is None else 1
    if weight.group_offsets is not None:
        per_group = weight.group_offsets.shape[1] // weight.num_groups
    return {
        "GROUPS": weight.num_groups, "BITS": 8 if weight.quants.dtype == torch.int8 else 4,
        "OFFSETS": per_group, "LEVELS": 1 if weight.group_scales is None else 3 if weight.has_halves else 2,
    }  # fmt: skip


def plain_linear(x: Tensor, projection: Projection) -> Tensor:
    """Return the product of x (T, K) with a projection (N, K), computed by PyTorch from the unpacked weight."""
    weight = projection.weight
    assert not isinstance(weight, PackedParts), "rows of different formats are only kept for the CPU"
    return functional.linear(x, weight if isinstance(weight, Tensor) else unpack(weight, x.dtype), projection.bias)


def unpack(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return a packed weight as a plain matrix (N, K)."""
    from clearhead.backends.cuda.triton_unpacking import unpack_rows

    y = torch.empty(weight.shape, dtype=dtype, device=weight.quants.device)
    block = min(_UNPACKED_GROUPS, power_of_two(weight.num_groups))
    grid = -(-len(y) // _UNPACKED_ROWS), -(-weight.num_groups // block)
    unpack_rows[grid](
        y, *packed_arguments(weight), len(y), K=weight.columns, BLOCK_N=_UNPACKED_ROWS, BLOCK_G=block, num_warps=4,
        **packed_format(weight),
    )  # fmt: skip
    return y


def attend(
    projected: Tensor,
    attention: LoweredAttention,
    cache: tuple[Tensor, Tensor],
    position: Tensor,
    table: tuple[Tensor, Tensor],
    workspace: tuple[Tensor, Tensor],
) -> Tensor:
    """Write the new token's key and value to the cache and attend to all tokens: (B, (N + 2K) H) -> (B, N H).

    cache: keys and values (B, K, capacity, H). position (B,): of the new token. table: cosines and sines (capacity,
    rotary_pairs). workspace: from `attention_workspace`.
    """
    from clearhead.backends.cuda.triton_attention import attend_row

    config, (keys, values), (states, arrivals) = attention.config, cache, workspace
    y = projected.new_empty(len(projected), config.num_heads * config.head_width)
    query_norm, key_norm = lower_norm(attention.query_norm), lower_norm(attention.key_norm)
    has_norms = query_norm is not None and key_norm is not None
    norm_weights = (query_norm.weight, key_norm.weight) if query_norm and key_norm else (y, y)  # y if absent
    window = config.pattern.size if isinstance(config.pattern, SlidingWindow) else _NO_WINDOW
    attend_row[states.shape[:2]](
        y, states, arrivals, projected, keys, values, position, *table, *norm_weights,
        keys.stride(0), keys.stride(1), window, attention.scale, query_norm.epsilon if query_norm else 0.0,
        N=config.num_heads, K=config.num_kv_heads, H=config.head_width,
        PAIRS=attention.rotary_pairs, INTERLEAVED=attention.interleaved,
        NORMED=has_norms, UNIT_OFFSET=int(query_norm is not None and query_norm.unit_offset),
        GROUP=states.shape[2], SPANS=states.shape[1], BLOCK=32, num_warps=4, **dependent_launch(projected.device),
    )  # fmt: skip
    return y


def attention_workspace(attention: LoweredAttention, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate what the programs of one head share.

    Return the partial results of each span of the cache (programs, spans, 16, H + 2), and a counter of the spans that
    have finished, so that the last one can join them.
    """
    config, programs = attention.config, batch * attention.config.num_kv_heads
    # Enough programs for every multiprocessor of the largest GPUs, and no more: joining a span costs time.
    num_spans = max(1, min(16, 128 // programs))
    states = torch.empty(programs, num_spans, 16, config.head_width + 2, dtype=torch.float32, device=device)
    return states, torch.zeros(programs, dtype=torch.int32, device=device)


def _tiling(num_rows: int, num_columns: int, gated: bool) -> dict[str, int]:
    """Return rows and columns of a program's tile and its warps.

    These are the best of 30 combinations on an H200, for the shapes of Llama 1B and 8B and SmolLM3 3B.
    """
    if gated:
        rows, columns, warps = 2, 2048, 2 if num_columns <= 2048 else 4
    elif num_columns <= 2048:
        rows, columns, warps = 8, 1024, 4
    elif num_columns <= 4096:
        rows, columns, warps = (8, 1024, 8) if num_rows >= 65536 else (4, 2048, 4)
    else:
        rows, columns, warps = (4, 1024, 2) if num_columns <= 12288 else (4, 512, 1)
    return {"BLOCK_N": rows, "BLOCK_K": columns, "num_warps": warps}


def _packed_tiling(num_rows: int, num_groups: int, is_int8: bool, gated: bool) -> tuple[dict[str, int], int]:
    """Return the tile of the packed kernel, which is as wide as the matrix, and its programs per multiprocessor.

    Of some 50 combinations for each shape, these are the best in the captured step of Llama 8B, and good in that of 1B,
    on an H200. Alone, other tiles are faster; in the step, a kernel that leaves registers free lets the next one load
    its first weights earlier.
    """
    block = power_of_two(num_groups)
    if is_int8 and gated:  # a program holds rows of both matrices
        groups, warps, programs = (1024, 8, 1) if block >= 128 else (512, 4, 3)
    elif num_rows >= _LARGE_OUTPUT:
        groups, warps, programs = 512, 4 if block <= 128 else 8, 4
    elif block >= 512:
        groups, warps, programs = 2048, 16, 1
    elif block <= 128 and 1 << 18 <= num_rows * block <= 1 << 19:
        # In 8 bits, a second program does not fit beside attention, and would load its weights only after it.
        groups, warps, programs = 2048, 8, 1 if is_int8 else 2
    else:
        groups, warps, programs = 1024, 4 if block <= 128 else 8, 2
    return {"BLOCK_N": max(2, groups // block), "BLOCK_G": block, "num_warps": warps}, programs


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return the options for programmatic dependent launch, which Hopper and later GPUs support."""
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if supported else {"PDL": False}
