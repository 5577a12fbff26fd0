"""A cache for packed tokens: the new tokens of many sequences side by side in one row, without padding.

    cache = PackedCache(storage, layout); hidden = network.hidden_states(tokens[None], cache=cache)   # (1, T, D)

Every sequence has its own length and its own pages. With pages of 4 slots, a prompt of 5 tokens and a running sequence
whose next token is its seventh:

    tokens          a0 a1 a2 a3 a4 b6        sequence_starts  0 5 6
    positions        0  1  2  3  4  6        lengths          5 7
    slots           12 13 14 15  0 22        page_tables      [3 0] [8 5]

The network's own modules read all keys of all sequences, and a mask keeps the sequences apart. This is the reference
for kernels that read the pages of each sequence in place.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.architecture import AttentionPattern
from clearhead.cache.page_storage import PageStorage
from clearhead.model import AttentionIndices


@dataclass(frozen=True)
class PackedLayout:
    """Which sequence and position each of T packed tokens belongs to, and where its keys and values are stored."""

    positions: Tensor  # (T,) int64, in its sequence
    slots: Tensor  # (T,) int64, where its key and value are written
    sequence_starts: Tensor  # (B + 1,) int32: first packed token of each sequence, and T
    lengths: Tensor  # (B,) int32: tokens of each sequence, including the new ones
    page_tables: Tensor  # (B, P) int32: the pages of each sequence in order, padded with 0

    @property
    def documents(self) -> Tensor:
        """The number of the sequence of each packed token (T,)."""
        counts = self.sequence_starts.diff().long()
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    def key_slots(self, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slot, the position and the sequence number of every key of every sequence (S,)."""
        lengths = self.lengths.long()
        documents = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        ends = lengths.cumsum(0)
        positions = torch.arange(len(documents), device=lengths.device) - (ends - lengths)[documents]
        pages = self.page_tables[documents, positions // page_size].long()
        return pages * page_size + positions % page_size, positions, documents


class PackedCache:
    """The cache of one step over packed tokens; the protocol of model/context.py."""

    def __init__(self, storage: PageStorage, layout: PackedLayout):
        self.storage = storage
        self.layout = layout
        self.key_slots: Tensor | None = None  # computed on first use: kernels that read pages in place never need it

    def prepare(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the positions (1, T) of packed tokens (1, T)."""
        assert mask is None, "packed tokens have no padding"
        assert tokens.shape == (1, len(self.layout.positions)), "the tokens do not match the layout"
        return self.layout.positions[None]

    def attention_indices(self, pattern: AttentionPattern) -> AttentionIndices:
        """Return the indices of the new tokens and of all keys, with the sequence of each."""
        self.key_slots, key_positions, key_documents = self.layout.key_slots(self.storage.pool.page_size)
        return AttentionIndices(
            self.layout.positions[None],
            key_positions[None],
            query_document=self.layout.documents[None],
            key_document=key_documents[None],
            contiguous_keys=False,
        )

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values (1, K, T, H) and return those of all tokens of all sequences (1, K, S, H)."""
        self.storage.layer_tensors(layer, key, value)
        self.storage.write(layer, self.layout.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        assert self.key_slots is not None
        keys, values = self.storage.read(layer, self.key_slots)  # (S, K, H)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    @property
    def has_single_tokens(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.layout.positions) == len(self.layout.lengths)

    def layer_pages(self, layer: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values (num_pages, K, page_size, H) of a layer, for a kernel that uses them in place.

        shape: (K, H, H of the values).
        """
        device = self.layout.positions.device
        key, value = (torch.empty(shape[0], 0, width, dtype=dtype, device=device) for width in shape[1:])
        return self.storage.layer_tensors(layer, key, value)

    def advance(self) -> None:
        """Do nothing: the lengths are in the page tables, and the next step has another layout."""
