"""Lay a schedule out as tensors: the tokens of all sequences in one row, and where each is stored.

    batch = PackedBatch.from_schedule(schedule.items, device)

packed_cache.py in cache/ shows such a layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from clearhead.cache import PackedLayout, PageTable
from clearhead.engine.scheduler import ScheduledTokens
from clearhead.engine.sequence import EngineSequence


@dataclass(frozen=True)
class PackedBatch:
    """The tokens of one step, and the sequences that get a new token from it."""

    tokens: Tensor  # (T,)
    layout: PackedLayout
    source_layout: PackedLayout | None  # the pages that the cross-attention of each sequence reads
    sampled_rows: Tensor  # (L,) the packed tokens after which a token is chosen
    sampled: list[EngineSequence]  # (L,) their sequences; one with a draft occurs once more for each drafted token
    has_prompts: bool  # whether a sequence has more than one new token

    @staticmethod
    def from_schedule(items: Sequence[ScheduledTokens], device: torch.device) -> "PackedBatch":
        """Lay out the tokens of a schedule in its order."""
        tokens = [token for item in items for token in item.sequence.tokens(item.start, item.stop)]
        ends = list(accumulate(item.stop - item.start for item in items))
        sampled = [
            (end - 1 - number, item.sequence)
            for end, item in zip(ends, items, strict=True)
            if item.is_sampled
            for number in reversed(range(1 + len(item.sequence.drafted)))
        ]
        tables = [_require(item.sequence.table) for item in items]
        sources = [item.sequence.source_table for item in items]
        return PackedBatch(
            tokens=upload(tokens, device),
            layout=_layout(tables, [item.start for item in items], device),
            source_layout=None if sources[0] is None else source_layout([_require(each) for each in sources], device),
            sampled_rows=upload([row for row, _ in sampled], device),
            sampled=[sequence for _, sequence in sampled],
            has_prompts=len(tokens) > len(items),
        )

    def tokens_alone(self) -> "Iterator[PackedBatch]":
        """Yield every token as a batch of its own, in order. A later token of a sequence attends to earlier ones."""
        for row, document in enumerate(self.layout.documents.tolist()):
            yield PackedBatch(
                tokens=self.tokens[row : row + 1],
                layout=_token_layout(self.layout, row, document),
                source_layout=None if self.source_layout is None else _select(self.source_layout, document),
                sampled_rows=self.sampled_rows[:0],
                sampled=[],
                has_prompts=False,
            )


def source_layout(tables: Sequence[PageTable], device: torch.device) -> PackedLayout:
    """Return the layout of complete sources, which are written once and then only read."""
    return _layout(tables, [0] * len(tables), device)


def _layout(tables: Sequence[PageTable], starts: Sequence[int], device: torch.device) -> PackedLayout:
    """Return the layout of the tokens of each table from its start on."""
    pairs = list(zip(tables, starts, strict=True))
    counts = [table.num_tokens - start for table, start in pairs]
    most_pages = max(len(table.pages) for table in tables)
    pages = [table.page_numbers + [0] * (most_pages - len(table.pages)) for table in tables]
    return PackedLayout(
        positions=upload([token for table, start in pairs for token in range(start, table.num_tokens)], device),
        slots=upload([slot for table, start in pairs for slot in table.slots(start, table.num_tokens)], device),
        sequence_starts=upload([0, *accumulate(counts)], device, torch.int32),
        lengths=upload([table.num_tokens for table in tables], device, torch.int32),
        page_tables=upload(pages, device, torch.int32),
    )


def _token_layout(layout: PackedLayout, row: int, document: int) -> PackedLayout:
    """Return the layout of one packed token of a sequence."""
    return PackedLayout(
        positions=layout.positions[row : row + 1],
        slots=layout.slots[row : row + 1],
        sequence_starts=torch.tensor([0, 1], dtype=torch.int32, device=layout.positions.device),
        lengths=layout.positions[row : row + 1].int() + 1,
        page_tables=layout.page_tables[document : document + 1],
    )


def _select(layout: PackedLayout, document: int) -> PackedLayout:
    """Return the layout of one complete source."""
    start, stop = layout.sequence_starts[document : document + 2].tolist()
    return PackedLayout(
        positions=layout.positions[start:stop],
        slots=layout.slots[start:stop],
        sequence_starts=layout.sequence_starts[document : document + 2] - start,
        lengths=layout.lengths[document : document + 1],
        page_tables=layout.page_tables[document : document + 1],
    )


def upload(values: list[int] | list[list[int]], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy numbers to a device. A GPU is not waited for."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _require(table: PageTable | None) -> PageTable:
    assert table is not None, "a scheduled sequence has its page tables"
    return table
