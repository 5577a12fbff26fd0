"""How the layers of a PagedDecoder attend: to the pages of running sequences, of packed prompts, or of packed sources.

step = PromptStep(layout); y = step.attend(projected, layer)        # (T, (N + 2K) H) -> (T, N H)
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from clearhead.backends.cuda.latent import LatentPages, attend_latent, store_latent
from clearhead.backends.cuda.paged_launch import (
    PagedAttention,
    QueryBlocks,
    attend_chunks,
    attend_pages,
    paged_workspace,
    store_keys,
)
from clearhead.backends.cuda.seats import Seats
from clearhead.cache import PackedLayout


@dataclass
class DecodeStep:
    """One new token of each active seat."""

    seats: Seats
    num_rows: int
    workspaces: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, projected: Tensor, pages: PagedAttention) -> Tensor:
        """Attend with queries, keys and values side by side (B, (N + 2K) H) -> (B, N H)."""
        return attend_pages(projected, pages, self.seats, self._workspace(pages, projected.device))

    def attend_source(self, query: Tensor, pages: PagedAttention) -> Tensor:
        """Attend to the source of each sequence (B, N H) -> (B, N H)."""
        return attend_pages(query, pages, self.seats, self._workspace(pages, query.device), cross=True)

    def attend_latent(self, queries: tuple[Tensor, Tensor], compressed: Tensor, pages: LatentPages) -> Tensor:
        """Attend to latents: queries (N, B, R) and (B, N, rotary), compressed (B, R + rotary) -> (N, B, R)."""
        store_latent(compressed, pages, seats=self.seats)
        return attend_latent(queries, pages, seats=self.seats)

    def _workspace(self, pages: PagedAttention, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a workspace for heads of this kind, allocated in the first run, which is not captured."""
        config = pages.attention.config
        sizes = config.num_heads, config.num_kv_heads, config.head_width
        if sizes not in self.workspaces:
            self.workspaces[sizes] = paged_workspace(pages.attention, self.num_rows, device)
        return self.workspaces[sizes]


@dataclass
class PromptStep:
    """Packed tokens of some sequences, and the layout of their sources in an encoder-decoder."""

    layout: PackedLayout
    source_layout: PackedLayout | None = None

    def attend(self, projected: Tensor, pages: PagedAttention) -> Tensor:
        """Attend with queries, keys and values side by side (T, (N + 2K) H) -> (T, N H)."""
        store_keys(projected, pages, self.layout)
        return attend_chunks(projected, pages, self.layout, self.layout, self._blocks_for(pages))

    def attend_source(self, query: Tensor, pages: PagedAttention) -> Tensor:
        """Attend to the source of each sequence (T, N H) -> (T, N H)."""
        assert self.source_layout is not None
        return attend_chunks(query, pages, self.layout, self.source_layout, self._blocks_for(pages))

    def attend_latent(self, queries: tuple[Tensor, Tensor], compressed: Tensor, pages: LatentPages) -> Tensor:
        """Attend to latents: queries (N, T, R) and (T, N, rotary), compressed (T, R + rotary) -> (N, T, R)."""
        store_latent(compressed, pages, layout=self.layout)
        blocks = self._blocks(pages.heads_per_program, num_rows=32)
        return attend_latent(queries, pages, layout=self.layout, blocks=blocks)

    @cached_property
    def _known_blocks(self) -> dict[tuple[int, int], QueryBlocks]:
        return {}

    def _blocks_for(self, pages: PagedAttention) -> QueryBlocks:
        config = pages.attention.config
        return self._blocks(config.num_heads // config.num_kv_heads)

    def _blocks(self, group: int, num_rows: int = 64) -> QueryBlocks:
        """Return the blocks of queries, computed once for all layers with equal groups."""
        if (group, num_rows) not in self._known_blocks:
            self._known_blocks[group, num_rows] = QueryBlocks.from_layout(self.layout, group, num_rows)
        return self._known_blocks[group, num_rows]


@dataclass
class SourceStep(PromptStep):
    """Packed sources in an encoder. A layer needs the keys and values of no other layer, so all share their pages."""

    page_size: int = 32
    scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @staticmethod
    def from_layout(layout: PackedLayout, page_size: int) -> "SourceStep":
        """Place the sources of a layout in adjacent pages of their own; nothing waits for the device."""
        starts, device = layout.sequence_starts.long(), layout.positions.device
        num_tokens, num_pages = len(layout.positions), (layout.lengths.long() + page_size - 1) // page_size
        first = num_pages.cumsum(0) - num_pages
        sequence = torch.searchsorted(starts[1:], torch.arange(num_tokens, device=device), right=True)
        most_pages = layout.page_tables.shape[1]
        return SourceStep(
            PackedLayout(
                positions=layout.positions,
                slots=first[sequence] * page_size + layout.positions,
                sequence_starts=layout.sequence_starts,
                lengths=layout.lengths,
                page_tables=(first[:, None] + torch.arange(most_pages, device=device)).int(),
            ),
            page_size=page_size,
        )

    def attend(self, projected: Tensor, pages: PagedAttention) -> Tensor:
        """Attend within each source with queries, keys and values side by side (T, (N + 2K) H) -> (T, N H)."""
        config = pages.attention.config
        num_pages = len(projected) // self.page_size + len(self.layout.lengths)
        shape = num_pages, config.num_kv_heads, self.page_size, config.head_width
        if shape not in self.scratch:
            self.scratch[shape] = projected.new_empty(shape), projected.new_empty(shape)
        keys, values = self.scratch[shape]
        return super().attend(projected, replace(pages, keys=keys, values=values))


Step = DecodeStep | PromptStep
