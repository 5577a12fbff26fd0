"""A cache in pages of a shared pool: sequences of any length in one batch, with shared prefixes.

    storage = PageStorage(PagePool(num_pages=64, page_size=16))
    cache = PagedCache(storage, [storage.pool.create_table(prompt)])

New tokens are padded to one length; pages hold only real ones. page_pool.py decides where tokens go, and
page_storage.py stores their keys and values. What a sequence attends to is gathered from the slots of its table, so
this is also the reference for a kernel that reads pages in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.architecture import AttentionPattern
from clearhead.cache.page_pool import OutOfPagesError, PageTable
from clearhead.cache.page_storage import PageStorage
from clearhead.model import AttentionIndices


class PagedCache:
    """Cache of the sequences that run as one batch. Each keeps its page table when the batch changes."""

    def __init__(self, storage: PageStorage, tables: Sequence[PageTable]):
        self.storage = storage
        self.tables = list(tables)
        self.lengths = [table.num_tokens for table in tables]

    # --- the protocol of model/context.py

    def prepare(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Allocate slots for the real tokens among new tokens (B, T) and return all positions (B, T)."""
        is_real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        self.truncate(self.lengths)  # discards the tokens of a step that is run again
        try:
            for table, row, row_is_real in zip(self.tables, tokens, is_real, strict=True):
                copy = table.append(row[row_is_real].tolist())
                if copy is not None:
                    self.storage.copy_page(*copy)
        except OutOfPagesError:
            self.truncate(self.lengths)
            raise
        starts = torch.tensor(self.lengths, device=tokens.device)[:, None]
        self.new_is_real = is_real
        self.positions = (starts + is_real.long().cumsum(dim=1) - 1).clamp(min=0)
        self.new_slots = self.slots_from(self.lengths, tokens.device)
        self.key_slots, self.key_is_real = self.all_slots(tokens.device)
        return self.positions

    def attention_indices(self, pattern: AttentionPattern) -> AttentionIndices:
        """Return the indices of the new tokens and of all tokens of each sequence, whatever the pattern."""
        index = torch.arange(self.key_is_real.shape[1], device=self.key_is_real.device)[None]
        return AttentionIndices(self.positions, index, self.key_is_real, contiguous_keys=False)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values (B, K, T, H) of real tokens and return those of all tokens (B, K, S, H)."""
        self.storage.layer_tensors(layer, key, value)
        new_key, new_value = (new.transpose(1, 2)[self.new_is_real] for new in (key, value))  # (real tokens, K, H)
        self.storage.write(layer, self.new_slots, new_key, new_value)
        keys, values = self.storage.read(layer, self.key_slots)  # (B, S, K, H)
        return keys.transpose(1, 2), values.transpose(1, 2)

    # --- for the decoding loop

    def advance(self) -> None:
        """Make the new tokens part of the past and publish their full pages."""
        for table in self.tables:
            table.publish()
        self.lengths = [table.num_tokens for table in self.tables]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Keep only the first tokens of each sequence."""
        for table, length in zip(self.tables, lengths, strict=True):
            table.truncate(length)
        self.lengths = list(lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of the used pages. A shared page counts once."""
        used = self.storage.pool.num_used / self.storage.pool.num_pages
        return round(self.storage.allocated_bytes * used)

    # --- slots

    def slots_from(self, starts: Sequence[int], device: torch.device) -> Tensor:
        """Return the slots of the tokens from each start to the end of its sequence, concatenated."""
        pairs = zip(self.tables, starts, strict=True)
        return torch.tensor(
            [slot for table, start in pairs for slot in table.slots(start, table.num_tokens)], device=device
        )

    def all_slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slots of all tokens (B, S), shorter sequences padded with slot 0, and which are real (B, S)."""
        lengths = torch.tensor([table.num_tokens for table in self.tables], device=device)
        is_real = torch.arange(int(lengths.max()), device=device)[None] < lengths[:, None]
        slots = torch.zeros(is_real.shape, dtype=torch.long, device=device)
        slots[is_real] = self.slots_from([0] * len(self.tables), device)
        return slots, is_real
