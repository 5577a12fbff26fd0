"""Latent attention over pages on the GPU: the absorbed form for prompts and for single tokens.

branch = build_latent_branch(module, pages, table, linear); y = branch(x, step)      # (T, D) -> (T, D)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from clearhead.architecture import LatentAttention
from clearhead.backends.cuda.launch import power_of_two
from clearhead.backends.cuda.paged_launch import QueryBlocks, add_and_normalize
from clearhead.backends.cuda.seats import Seats
from clearhead.backends.lowering_norms import NormModule, NormSettings, lower_norm
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.cache import PackedLayout
from clearhead.model import LatentAttentionLayer


@dataclass(frozen=True)
class LatentPages:
    """The settings of a latent attention layer, its pages and its rotation table."""

    config: LatentAttention
    scale: float
    latents: Tensor  # (pages, 1, page_size, R)
    rotary_keys: Tensor  # (pages, 1, page_size, rotary_width)
    cosine: Tensor
    sine: Tensor
    norm: NormSettings

    @property
    def heads_per_program(self) -> int:
        """Number of heads whose queries one program has; all of them share the latents that it reads."""
        return min(16, power_of_two(self.config.num_heads))


class _LatentStep(Protocol):
    def attend_latent(self, queries: tuple[Tensor, Tensor], compressed: Tensor, pages: LatentPages) -> Tensor: ...


@dataclass(frozen=True)
class LatentBranch:
    """A latent attention layer with merged projections, and its pages."""

    module: LatentAttentionLayer
    pages: LatentPages
    inputs: Projection  # x -> queries, plain or compressed, latents and rotary keys
    query_up: Projection | None
    output: Projection
    linear: Callable[[Tensor, Projection], Tensor]

    def __call__(self, x: Tensor, step: object) -> Tensor:
        """Normalized x (T, D) -> (T, D)."""
        module, config = self.module, self.module.config
        compressed_width = config.latent_rank + config.rotary_width
        projected = self.linear(x, self.inputs)
        query, compressed = projected[:, :-compressed_width], projected[:, -compressed_width:]
        if self.query_up is not None:
            query = add_and_normalize(query.contiguous(), None, cast(NormModule, module.query_norm))
            query = self.linear(query, self.query_up)
        query = query.unflatten(1, (config.num_heads, -1))  # (T, N, plain + rotary)
        unfold = module.unfold.weight.view(config.num_heads, -1, config.latent_rank)  # (N, plain + value, R)
        to_key, to_value = unfold.split((config.plain_width, config.value_width), dim=1)
        absorbed = torch.bmm(query[..., : config.plain_width].transpose(0, 1), to_key)  # (N, T, R)
        queries = absorbed, query[..., config.plain_width :]
        attended = cast(_LatentStep, step).attend_latent(queries, compressed, self.pages)
        values = torch.bmm(attended, to_value.transpose(1, 2))  # (N, T, value)
        return self.linear(values.transpose(0, 1).flatten(1), self.output)


def build_latent_branch(
    module: LatentAttentionLayer,
    pages: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor],
    linear: Callable[[Tensor, Projection], Tensor],
) -> LatentBranch:
    """Merge the projections of a latent attention layer that have the same input."""
    norm = lower_norm(module.latent_norm)
    assert norm is not None
    has_rank = module.config.query_rank is not None
    return LatentBranch(
        module,
        LatentPages(module.config, module.scale, *pages, *table, norm),
        inputs=merge_projections(module.query_down if has_rank else module.query, module.latent),
        query_up=merge_projections(module.query_up) if has_rank else None,
        output=merge_projections(module.output),
        linear=linear,
    )


def store_latent(
    compressed: Tensor, pages: LatentPages, *, seats: Seats | None = None, layout: PackedLayout | None = None
) -> None:
    """Write the latents and rotary keys of compressed tokens (T, R + rotary) to the pages of their sequences."""
    from clearhead.backends.cuda import triton_latent

    if seats is not None:
        places = seats.position, seats.position, seats.active, seats.page_tables
    else:
        assert layout is not None
        places = layout.slots, layout.positions, layout.lengths, layout.page_tables
    triton_latent.store_latent[(len(compressed),)](
        compressed, compressed.stride(0), pages.latents, pages.rotary_keys, *places, pages.cosine, pages.sine,
        pages.norm.weight, pages.norm.epsilon, places[3].stride(0), UNIT_OFFSET=pages.norm.unit_offset,
        DECODE=seats is not None, num_warps=4, **_sizes(pages),
    )  # fmt: skip


def attend_latent(
    queries: tuple[Tensor, Tensor],
    pages: LatentPages,
    *,
    seats: Seats | None = None,
    layout: PackedLayout | None = None,
    blocks: QueryBlocks | None = None,
) -> Tensor:
    """Attend with absorbed queries (N, T, R) and rotary queries (T, N, rotary), a view, -> (N, T, R)."""
    from clearhead.backends.cuda import triton_latent

    config, (query, rotary_query) = pages.config, queries
    num_heads, num_tokens, _ = query.shape
    heads = pages.heads_per_program
    if seats is not None:
        places = seats.active, seats.active, seats.active, seats.active, seats.position, seats.page_tables
        num_blocks, num_rows = num_tokens, 16
    else:
        assert layout is not None
        assert blocks is not None
        starts = layout.sequence_starts, layout.lengths, layout.positions, layout.page_tables
        places = blocks.sequences, blocks.starts, *starts
        num_blocks, num_rows = len(blocks.starts), blocks.num_rows
    num_groups = -(-num_heads // heads)
    num_spans = max(1, min(16, 128 // (num_blocks * num_groups))) if seats is not None else 1
    num_spans = 1 << (num_spans.bit_length() - 1)
    states = query.new_empty(num_heads, num_tokens, num_spans, config.latent_rank + 2, dtype=torch.float32)
    y = torch.zeros_like(query) if seats is not None else torch.empty_like(query)  # rows without a sequence stay 0
    triton_latent.attend_latent[num_blocks, num_groups, num_spans](
        y, states, query, rotary_query, pages.latents, pages.rotary_keys, *places, pages.cosine, pages.sine, num_tokens,
        places[5].stride(0), rotary_query.stride(0), rotary_query.stride(1), pages.scale * math.log2(math.e),
        N=num_heads, HEADS=heads, DECODE=seats is not None, SPANS=num_spans, BLOCK_M=num_rows, BLOCK_N=32,
        num_warps=4 if num_rows == 16 else 8, num_stages=2, **_sizes(pages),
    )  # fmt: skip
    if seats is not None and num_spans > 1:
        triton_latent.join_latent[(num_heads * num_tokens,)](
            y, states, seats.active, num_tokens, R=config.latent_rank, BLOCK_R=_sizes(pages)["BLOCK_R"],
            SPANS=num_spans, num_warps=4,
        )  # fmt: skip
    return y


def _sizes(pages: LatentPages) -> dict[str, int | bool]:
    config = pages.config
    return {
        "R": config.latent_rank, "BLOCK_R": max(16, power_of_two(config.latent_rank)), "H": config.rotary_width,
        "BLOCK_H": max(16, power_of_two(config.rotary_width)), "PAGE": pages.latents.shape[2],
        "PAIRS": config.rotary_width // 2, "INTERLEAVED": config.rope.pairing == "interleaved",
    }  # fmt: skip
