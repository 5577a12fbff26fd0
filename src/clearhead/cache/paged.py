"""A cache in pages of one pool: rows of any length side by side, beginnings shared, nothing padded.

    memory = PageStorage(PagePool(num_pages=64, page_size=16)); cache = PagedCache(memory, [memory.pool.start(prompt)])

`pages.py` says where tokens go; here the numbers move. Keys and values of a layer stand in (slots, K, H); what a row
attends is gathered from the slots of its table, so this is also the plain twin of a kernel that reads pages in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.architecture import AttentionPattern
from clearhead.cache.pages import BlockTable, OutOfPagesError, PagePool
from clearhead.model import Grid


@dataclass
class PageStorage:
    """The numbers behind a pool: for each layer a key and a value tensor (num_pages · page_size, K, H)."""

    pool: PagePool
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.layers:
            num_slots = self.pool.num_pages * self.pool.page_size
            made = (part.new_zeros(num_slots, part.shape[1], part.shape[3]) for part in (key, value))
            self.layers[layer] = (next(made), next(made))
        return self.layers[layer]

    def copy(self, source: int, destination: int) -> None:
        size = self.pool.page_size
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[destination * size : (destination + 1) * size] = tensor[source * size : (source + 1) * size]

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers.values() for tensor in pair)


class PagedCache:
    """Sequences that run as one batch for a while; each keeps its table when the batch changes."""

    def __init__(self, memory: PageStorage, tables: Sequence[BlockTable]):
        self.memory, self.tables = memory, list(tables)
        self.lengths = [table.num_tokens for table in tables]

    def begin(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """New tokens (B, T), real where the mask says; a table takes its row's real ones."""
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        self.truncate(self.lengths)  # a step that is run again
        try:
            for table, row, is_real in zip(self.tables, tokens, real, strict=True):
                copy = table.append(row[is_real].tolist())
                if copy is not None:
                    self.memory.copy(*copy)
        except OutOfPagesError:
            self.truncate(self.lengths)
            raise
        starts = torch.tensor(self.lengths, device=tokens.device)[:, None]
        self.real, self.positions = real, (starts + real.long().cumsum(dim=1) - 1).clamp(min=0)
        self.new_slots = self.slots_of(self.lengths, tokens.device)
        self.held_slots, self.held = self.all_slots(tokens.device)
        return self.positions

    def slots_of(self, starts: Sequence[int], device: torch.device) -> Tensor:
        """Of every token from these starts on, row after row."""
        pairs = zip(self.tables, starts, strict=True)
        return torch.tensor(
            [slot for table, start in pairs for slot in table.slots(start, table.num_tokens)], device=device
        )

    def all_slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, S) slots and which of them are real; a shorter row is filled up with slot 0, unseen."""
        lengths = torch.tensor([table.num_tokens for table in self.tables], device=device)
        held = torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]
        slots = torch.zeros(held.shape, dtype=torch.long, device=device)
        slots[held] = self.slots_of([0] * len(self.tables), device)
        return slots, held

    def grid(self, pattern: AttentionPattern) -> Grid:
        index = torch.arange(self.held.shape[1], device=self.held.device)[None]
        return Grid(self.positions, index, self.held, whole=False)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.memory.of_layer(layer, key, value)
        for pool, new in zip(kept, (key, value), strict=True):
            pool[self.new_slots] = new.transpose(1, 2)[self.real]  # (real tokens, K, H)
        keys, values = (pool[self.held_slots].transpose(1, 2) for pool in kept)  # (B, K, S, H)
        return keys, values

    def advance(self) -> None:
        """The tokens last run are now the past, and full pages of them may be shared."""
        for table in self.tables:
            table.publish()
        self.lengths = [table.num_tokens for table in self.tables]

    def truncate(self, lengths: Sequence[int]) -> None:
        for table, length in zip(self.tables, lengths, strict=True):
            table.truncate(length)
        self.lengths = list(lengths)

    @property
    def num_bytes(self) -> int:
        """Of the pages in use, shared ones once."""
        share = self.memory.pool.num_used / self.memory.pool.num_pages
        return round(self.memory.allocated_bytes * share)
