"""The Triton kernels over pages, and those between products, as functions of tensors.

y = attend_pages(projected, layer, seats, workspace)        # (B, (N + 2K) H) -> (B, N H)
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    Alibi,
    AttentionPattern,
    Bidirectional,
    Chunked,
    QueryTemperature,
    RotatedHeadNorm,
    SlidingWindow,
)
from clearhead.backends.cuda.launch import dependent_launch, packed_arguments, packed_format, power_of_two
from clearhead.backends.cuda.seats import Seats
from clearhead.backends.lowering import LoweredAttention
from clearhead.backends.lowering_norms import NormModule, lower_norm
from clearhead.backends.modules import PackedTable
from clearhead.cache import PackedLayout

_LOG2_E = math.log2(math.e)  # the kernel of prompts computes powers of two
_UNLIMITED = 1 << 30  # a window or chunk that is larger than any text
_MIN_SPAN = 512  # keys of a sequence that are not worth dividing, if other sequences keep the GPU busy
_EMBEDDED_GROUPS = 16  # groups of 32 values of a packed token table that a program unpacks
_FEW_PROGRAMS = 128  # about the number of multiprocessors of the largest GPUs


@dataclass(frozen=True)
class PagedAttention:
    """The settings of an attention layer, its pages and its tables of positions."""

    attention: LoweredAttention
    keys: Tensor  # (pages, K, page_size, H)
    values: Tensor
    cosine: Tensor  # (positions, rotary_pairs)
    sine: Tensor
    bias: Tensor  # slopes (N,) float32 with ALiBi, T5's table (num_buckets, N), otherwise empty
    buckets: Tensor  # (2 reach + 1,) int32: the bucket of each distance from -reach to reach, otherwise empty


@dataclass(frozen=True)
class QueryBlocks:
    """Which tokens each program of `attend_chunks` has: computed once per step, on the device, for all layers."""

    sequences: Tensor  # (blocks,) int32: -1 beyond the last one
    starts: Tensor  # (blocks,) int32: first of its packed tokens
    num_rows: int  # queries of a block: tokens times query heads per key-value head

    @staticmethod
    def from_layout(layout: PackedLayout, group: int, num_rows: int = 64) -> "QueryBlocks":
        """Divide the tokens of every sequence into blocks. group: query heads that share a key-value head."""
        num_rows = max(num_rows, power_of_two(group))
        num_tokens = num_rows // group
        starts, count = layout.sequence_starts, len(layout.positions) // num_tokens + len(layout.lengths)
        ends = ((starts.diff() + num_tokens - 1) // num_tokens).cumsum(0)  # end of the blocks of each sequence
        block = torch.arange(count, device=starts.device)
        sequence = torch.searchsorted(ends, block, right=True)
        known = sequence.clamp(max=len(ends) - 1)
        place = block - torch.where(known > 0, ends[known - 1], 0)
        sequences = torch.where(sequence < len(ends), sequence, -1).int()
        return QueryBlocks(sequences, (starts[known] + place * num_tokens).int(), num_rows)


def attend_pages(
    projected: Tensor, layer: PagedAttention, seats: Seats, workspace: tuple[Tensor, Tensor], *, cross: bool = False
) -> Tensor:
    """Write the new token's key and value to its page and attend to its sequence: (B, (N + 2K) H) -> (B, N H).

    Row b belongs to the seat `seats.active[b]`. workspace: from `paged_workspace`. cross: attend with queries (B, N H)
    to the source of the sequence instead.
    """
    from clearhead.backends.cuda import triton_pages

    attention, (states, num_finished) = layer.attention, workspace
    config = attention.config
    y = projected.new_empty(len(projected), config.num_heads * config.head_width)
    query_norm, key_norm, epsilon, options = _head_options(attention, projected)
    numbers, flags = _score_options(layer)
    positions, tables = (seats.source_length, seats.source_tables) if cross else (seats.position, seats.page_tables)
    triton_pages.attend_pages[states.shape[:2]](
        y, states, num_finished, projected, layer.keys, layer.values, seats.active, positions, tables,
        layer.cosine, layer.sine, query_norm, key_norm, layer.bias, layer.buckets, tables.stride(0),
        *_limits(config.pattern), attention.scale, epsilon, *numbers, PAGE=layer.keys.shape[2],
        CROSS=cross, GROUP=states.shape[2], SPANS=states.shape[1], **flags,
        **_decode_tile(len(states), config.head_width), **options,
    )  # fmt: skip
    return y


def paged_workspace(attention: LoweredAttention, num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate what the programs of one head share.

    Return the partial results of each span of the keys (programs, spans, GROUP, BLOCK_H + 2), and a counter of the
    spans that have finished, so that the last one can join them.
    """
    config, programs = attention.config, num_rows * attention.config.num_kv_heads
    # Enough programs for every multiprocessor, and a few for a long sequence among many.
    num_spans = max(2 if programs > 8 * _FEW_PROGRAMS else 8, min(16, _FEW_PROGRAMS // programs))
    group = max(16, power_of_two(config.num_heads // config.num_kv_heads))
    shape = programs, num_spans, group, _tile_width(config.head_width) + 2
    return torch.empty(shape, device=device), torch.zeros(programs, dtype=torch.int32, device=device)


def store_keys(projected: Tensor, layer: PagedAttention, layout: PackedLayout) -> None:
    """Write the keys and values of packed tokens to their pages: (T, (N + 2K) H), or without queries (T, 2K H)."""
    from clearhead.backends.cuda import triton_chunks

    config = layer.attention.config
    _, key_norm, epsilon, options = _head_options(layer.attention, projected)
    options["N"] = projected.shape[1] // config.head_width - 2 * config.num_kv_heads
    triton_chunks.store_keys[(len(projected),)](
        projected, layer.keys, layer.values, layout.slots, layout.positions, layer.cosine, layer.sine, key_norm,
        epsilon, PAGE=layer.keys.shape[2], BLOCK_K=power_of_two(config.num_kv_heads), num_warps=2, **options,
    )  # fmt: skip


def attend_chunks(
    projected: Tensor, layer: PagedAttention, layout: PackedLayout, keys: PackedLayout, blocks: QueryBlocks
) -> Tensor:
    """Attend with the queries of packed tokens, which begin their rows, to pages: (T, ...) -> (T, N H).

    keys: the layout of the keys, which is that of the tokens themselves or of their sources.
    """
    from clearhead.backends.cuda import triton_chunks

    attention, config = layer.attention, layer.attention.config
    y = projected.new_empty(len(projected), config.num_heads * config.head_width)
    query_norm, _, epsilon, options = _head_options(attention, projected)
    window, chunk = _limits(config.pattern)
    numbers, flags = _score_options(layer, _LOG2_E)
    triton_chunks.attend_chunks[len(blocks.starts), config.num_kv_heads](
        y, projected, layer.keys, layer.values, blocks.sequences, blocks.starts, layout.sequence_starts, keys.lengths,
        keys.page_tables, layer.cosine, layer.sine, query_norm, layer.bias, layer.buckets, keys.page_tables.stride(0),
        window, chunk, attention.scale * _LOG2_E, epsilon, *numbers, PAGE=layer.keys.shape[2], ROW=projected.shape[1],
        BIDIRECTIONAL=isinstance(config.pattern, Bidirectional), WINDOWED=min(window, chunk) < _UNLIMITED,
        BLOCK_M=blocks.num_rows, BLOCK_N=64, num_warps=4, num_stages=3, **flags, **options,
    )  # fmt: skip
    return y


def add_and_normalize(x: Tensor, branch: Tensor | None, norm: NormModule) -> Tensor:
    """Add a branch (T, D) to x (T, D) in place, and return norm(x)."""
    from clearhead.backends.cuda.triton_rows import normalize_rows

    settings, y = lower_norm(norm), torch.empty_like(x)
    assert settings is not None
    width = x.shape[1]
    normalize_rows[(len(x),)](
        y, x, x if branch is None else branch, settings.weight, x if settings.bias is None else settings.bias,
        settings.epsilon, D=width, BLOCK_D=power_of_two(width), KIND=settings.kind, UNIT_OFFSET=settings.unit_offset,
        BIAS=settings.bias is not None, ADD=branch is not None, num_warps=4 if width <= 2048 else 8,
        **dependent_launch(x.device),
    )  # fmt: skip
    return y


def activate(inner: Tensor, gated: bool, activation: str) -> Tensor:
    """Return activation(gate) · up for gate and up side by side (T, 2F), or activation(up) without a gate."""
    from clearhead.backends.cuda.triton_rows import activate_rows

    width = inner.shape[1] // 2 if gated else inner.shape[1]
    y = inner.new_empty(len(inner), width)
    activate_rows[len(inner), -(-width // 1024)](
        y, inner, F=width, BLOCK_F=1024, GATED=gated, ACTIVATION=activation, num_warps=4,
        **dependent_launch(inner.device),
    )  # fmt: skip
    return y


def embed_seats(table: nn.Embedding | PackedTable, scale: float, seats: Seats, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the scaled rows (B, D) of a token table for the first `num_rows` active seats, and their positions (B,).

    As in TokenEmbedding, the scale is first rounded to the precision of the rows.
    """
    from clearhead.backends.cuda import triton_embedding as kernels

    weight, dtype = (
        (table.packed, table.dtype) if isinstance(table, PackedTable) else (table.weight, table.weight.dtype)
    )
    size, width = weight.shape
    x = torch.empty(num_rows, width, dtype=dtype, device=seats.device)
    positions = torch.empty(num_rows, dtype=torch.int64, device=seats.device)
    arguments = x, positions, seats.active, seats.integers, seats.num_seats
    factor = torch.full((), scale, dtype=dtype).item()
    options = {"K": width, "SCALED": scale != 1.0, "num_warps": 4} | dependent_launch(seats.device)
    if isinstance(weight, Tensor):
        kernels.embed_plain[num_rows, -(-width // 1024)](*arguments, weight, factor, BLOCK_K=1024, **options)
    else:  # products and sums are rounded one by one, as in the module
        kernels.embed_packed[num_rows, -(-weight.num_groups // _EMBEDDED_GROUPS)](
            *arguments, *packed_arguments(weight), size, factor, BLOCK_G=_EMBEDDED_GROUPS, enable_fp_fusion=False,
            **packed_format(weight), **options,
        )  # fmt: skip
    return x, positions


def _head_options(attention: LoweredAttention, projected: Tensor) -> tuple[Tensor, Tensor, float, dict[str, Any]]:
    """Return the weights of the head norms, their epsilon, and the options that all attention kernels have."""
    config = attention.config
    query_norm, key_norm = lower_norm(attention.query_norm), lower_norm(attention.key_norm)
    rotated_norm = config.head_norm if isinstance(config.head_norm, RotatedHeadNorm) else None
    options = {
        "N": config.num_heads, "K": config.num_kv_heads, "H": config.head_width,
        "BLOCK_H": _tile_width(config.head_width), "PAIRS": attention.rotary_pairs,
        "INTERLEAVED": attention.interleaved, "NORMED": query_norm is not None,
        "UNIT_OFFSET": int(query_norm is not None and query_norm.unit_offset),
        "NORMED_AFTER": rotated_norm is not None,
    } | dependent_launch(projected.device)  # fmt: skip
    if query_norm is None or key_norm is None:
        return projected, projected, rotated_norm.epsilon if rotated_norm else 0.0, options  # no norm: placeholders
    return query_norm.weight, key_norm.weight, query_norm.epsilon, options


def _score_options(layer: PagedAttention, factor: float = 1.0) -> tuple[tuple[float, float, int], dict[str, int]]:
    """Return softcap · factor, the temperature and its floor; and which of them, and biases, the layer has."""
    config = layer.attention.config
    temperature = config.temperature if isinstance(config.temperature, QueryTemperature) else None
    numbers = (config.softcap or 0.0) * factor, 0.0 if temperature is None else temperature.scale
    flags = {
        "CAPPED": config.softcap is not None, "TEMPERED": temperature is not None,
        "ALIBI": isinstance(config.position, Alibi), "REACH": len(layer.buckets) // 2,
    }  # fmt: skip
    return (*numbers, 1 if temperature is None else temperature.floor), flags


def _decode_tile(num_programs: int, head_width: int) -> dict[str, int]:
    """Return the tile of `attend_pages`: the best of nine on an H200, for Llama 1B and 8B and 1 to 256 sequences."""
    if num_programs < _FEW_PROGRAMS:
        return {"BLOCK": 64, "num_warps": 8 if head_width >= 128 else 4, "MIN_SPAN": 64}
    return {"BLOCK": 32, "num_warps": 2, "MIN_SPAN": _MIN_SPAN}


def _limits(pattern: AttentionPattern) -> tuple[int, int]:
    """Return the window and the chunk of a pattern."""
    window = pattern.size if isinstance(pattern, SlidingWindow) else _UNLIMITED
    return window, pattern.size if isinstance(pattern, Chunked) else _UNLIMITED


def _tile_width(head_width: int) -> int:
    """Return the columns of the tile that holds a head; tl.dot needs at least 16."""
    return max(16, power_of_two(head_width))
