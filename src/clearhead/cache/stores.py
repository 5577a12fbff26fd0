"""Keys and values of one layer: a contiguous store for all tokens, or a sliding store for the last ones.

    store = ContiguousStore(); k, v = store.write(length, k, v)     # (B, K, T, H) in, (B, K, S, H) out

`length` is the number of tokens before the new ones. `token_indices` names the token in each slot that `write` returns,
so that the mask matches them. Writing twice at the same length overwrites; only `KeyValueCache.advance` moves on.

Latent attention stores its latent (B, 1, T, R) as the key and its rotary key (B, 1, T, H_r) as the value, so keys and
values may have different widths. The first write sets them.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from clearhead.errors import ClearheadError

EMPTY = -1  # token index of a slot without a token
_FIRST_RING_SLOTS = 2048  # a larger ring begins with these slots and doubles when they are full


class ReservedSlot(NamedTuple):
    """Where a kernel writes one new token, and how many slots it then attends to."""

    key: Tensor  # (B, K, capacity, H)
    value: Tensor
    slot: int
    num_slots: int


class Store(Protocol):
    """What the stores have in common. `length` is always the number of tokens before the new ones."""

    key: Tensor | None
    value: Tensor | None

    def write(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, K, T, H) and return everything to attend to (B, K, S, H)."""

    def reserve(
        self, length: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> ReservedSlot:
        """Make room for one token of `shape` (B, K, H, H of the values) that a kernel will write."""

    def token_indices(self, length: int, num_new: int) -> Tensor:
        """Return the index of the token in each slot (S,) that `write` returns; EMPTY if it holds none."""

    def advance(self) -> None:
        """Make the tokens written last part of the past."""

    def select(self, indices: Tensor) -> "Store":
        """Return a copy with the sequences at these batch indices."""

    def reorder(self, indices: Tensor, length: int) -> None:
        """Replace sequence b by sequence indices[b], in place."""

    def truncate(self, peak_length: int, length: int) -> None:
        """Keep only the first `length` tokens, where at most `peak_length` have ever been written."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers by name; none before the first write."""

    def restore(self, key: Tensor, value: Tensor, length: int) -> None:
        """Use buffers that were saved with `length` tokens. Raise ValueError if they do not fit."""

    def num_bytes(self, length: int) -> int:
        """Return the bytes that `length` tokens occupy."""


class KeyValueBuffers:
    """A key and a value buffer (B, K, slots, H), allocated on the first write."""

    key: Tensor | None = None
    value: Tensor | None = None

    def advance(self) -> None:
        """Make the tokens written last part of the past. They are in place already."""

    def reorder(self, indices: Tensor, length: int) -> None:
        """Replace sequence b by sequence indices[b], in place."""
        buffers = self.tensors().values()
        assert all(len(indices) == len(buffer) for buffer in buffers), (
            "indices must name one sequence for each in the batch"
        )
        for buffer in buffers:  # slots after `length` are written before they are read
            buffer[:, :, :length] = buffer[:, :, :length].index_select(0, indices)

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers by name; none before the first write."""
        return {} if self.key is None or self.value is None else {"key": self.key, "value": self.value}

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes that `num_tokens` slots occupy."""
        buffers = self.tensors().values()
        return sum(t.shape[0] * t.shape[1] * num_tokens * t.shape[3] * t.element_size() for t in buffers)


class ContiguousStore(KeyValueBuffers):
    """All tokens in order, in buffers that double when they are full. `write` returns views of them, never copies."""

    def __init__(self, capacity: int = 64):
        self.capacity = capacity

    def write(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, K, T, H) and return those of all tokens (B, K, S, H)."""
        end = length + key.shape[2]
        keys, values = self.ensure_capacity(length, end, key, value)
        keys[:, :, length:end] = key
        values[:, :, length:end] = value
        return keys[:, :, :end], values[:, :, :end]

    def ensure_capacity(self, length: int, end: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers for at least `end` tokens like key and value. If memory runs out, both stay unchanged."""
        if self.key is not None and self.value is not None and end <= self.key.shape[2]:
            return self.key, self.value
        capacity = self.capacity
        while capacity < end:
            capacity *= 2
        larger_key = grow(self.key, key, length, capacity)
        larger_value = grow(self.value, value, length, capacity)
        self.key, self.value = larger_key, larger_value
        self.capacity = capacity
        return self.key, self.value

    def reserve(
        self, length: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> ReservedSlot:
        """Make room for one token of `shape` (B, K, H, H of the values) that a kernel will write."""
        key, value = (torch.empty(*shape[:2], 0, width, dtype=dtype, device=device) for width in shape[2:])
        return ReservedSlot(*self.ensure_capacity(length, length + 1, key, value), length, length + 1)

    def token_indices(self, length: int, num_new: int) -> Tensor:
        """Return the index of the token in each slot (S,) that `write` returns."""
        return torch.arange(length + num_new)

    def select(self, indices: Tensor) -> "ContiguousStore":
        """Return a copy with the sequences at these batch indices."""
        other = ContiguousStore(self.capacity)
        if self.key is not None and self.value is not None:
            other.key, other.value = self.key[indices], self.value[indices]
        return other

    def truncate(self, peak_length: int, length: int) -> None:
        """Do nothing: the next write overwrites the later slots."""

    def restore(self, key: Tensor, value: Tensor, length: int) -> None:
        """Use buffers that were saved with `length` tokens. Raise ValueError if they do not fit."""
        if key.ndim != 4 or value.ndim != 4 or not length <= key.shape[2] == value.shape[2]:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit {length} tokens")
        self.key = key
        self.value = value
        self.capacity = max(key.shape[2], 1)

    def num_bytes(self, length: int) -> int:
        """Return the bytes that `length` tokens occupy; the buffers may be larger."""
        return self.bytes_for(length)


def grow(buffer: Tensor | None, like: Tensor, length: int, capacity: int) -> Tensor:
    """Return a buffer with `capacity` slots for keys or values like these, with the first `length` of `buffer`."""
    larger = like.new_zeros(*like.shape[:2], capacity, like.shape[3])
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger


class SlidingStore(KeyValueBuffers):
    """The last `window` tokens in a ring buffer: token t is in slot t mod size.

    The ring has window + slack slots. It can be truncated by up to `slack` tokens, and up to slack + 1 new tokens are
    written in place. A large ring is allocated in steps: as long as the text is shorter, it has only the first slots.
    """

    def __init__(self, window: int, slack: int = 16):
        self.window = window
        self.slack = slack
        self.size = window + slack
        self.pending: tuple[Tensor, Tensor] | None = None  # what `advance` makes the ring, after a long write

    def write(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values (B, K, T, H) and return the ring, followed by the new ones if they are many."""
        num_new = key.shape[2]
        if self.fits_in_place(num_new):
            num_slots = self.num_slots(length + num_new)
            self.key, self.value = self.grown(length, num_slots, key, value)
            slots = torch.arange(length, length + num_new, device=key.device) % self.size
            self.key[:, :, slots] = key
            self.value[:, :, slots] = value
            self.pending = None
            return self.key[:, :, :num_slots], self.value[:, :, :num_slots]
        num_slots = self.num_slots(length)
        self.key, self.value = self.grown(length, num_slots, key, value)
        past = self.key[:, :, :num_slots], self.value[:, :, :num_slots]
        attended = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        num_kept = min(num_new, self.size)
        slots = torch.arange(length + num_new - num_kept, length + num_new, device=key.device) % self.size
        capacity = max(self.num_slots(length + num_new), self.key.shape[2])
        self.pending = grow(self.key, key, length, capacity), grow(self.value, value, length, capacity)
        self.pending[0][:, :, slots] = key[:, :, -num_kept:]
        self.pending[1][:, :, slots] = value[:, :, -num_kept:]
        return attended

    def reserve(
        self, length: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> ReservedSlot:
        """Make room for one token of `shape` (B, K, H, H of the values) that a kernel will write."""
        key, value = (torch.empty(*shape[:2], 0, width, dtype=dtype, device=device) for width in shape[2:])
        num_slots = self.num_slots(length + 1)
        self.key, self.value = self.grown(length, num_slots, key, value)
        self.pending = None
        return ReservedSlot(self.key, self.value, length % self.size, num_slots)

    def num_slots(self, length: int) -> int:
        """Return how many slots the first `length` tokens need: a power of two, or all of the ring.

        This depends on `length` alone, so that a mask can be made before the write, also after a write that failed.
        """
        num_slots = _FIRST_RING_SLOTS
        while num_slots < min(length, self.size):
            num_slots *= 2
        return min(num_slots, self.size)

    def grown(self, length: int, num_slots: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers like key and value with at least `num_slots` slots and the first `length` tokens."""
        if self.key is not None and self.value is not None and num_slots <= self.key.shape[2]:
            return self.key, self.value
        return grow(self.key, key, length, num_slots), grow(self.value, value, length, num_slots)

    def advance(self) -> None:
        """Make the tokens written last part of the past."""
        if self.pending is not None:
            (self.key, self.value), self.pending = self.pending, None

    def fits_in_place(self, num_new: int) -> bool:
        """Whether the window of the first new token is still complete after the last one has been written."""
        return num_new <= self.slack + 1

    def token_indices(self, length: int, num_new: int) -> Tensor:
        """Return the index of the token in each slot (S,) that `write` returns; EMPTY if it holds none."""
        if self.fits_in_place(num_new):
            return self.ring_indices(length + num_new)
        return torch.cat((self.ring_indices(length), torch.arange(length, length + num_new)))

    def ring_indices(self, length: int) -> Tensor:
        """Return the token in each slot after `length` tokens: the latest t < length with t mod size = slot."""
        slot = torch.arange(self.num_slots(length))
        latest = length - 1 - (length - 1 - slot) % self.size
        return torch.where(latest >= 0, latest, EMPTY)

    def select(self, indices: Tensor) -> "SlidingStore":
        """Return a copy with the sequences at these batch indices."""
        other = SlidingStore(self.window, self.slack)
        if self.key is not None and self.value is not None:
            other.key, other.value = self.key[indices], self.value[indices]
        return other

    def truncate(self, peak_length: int, length: int) -> None:
        """Keep only the first `length` tokens. Raise ClearheadError if the ring has overwritten tokens they need."""
        if peak_length - length > self.slack and length > 0:
            raise ClearheadError(
                f"a sliding cache with a slack of {self.slack} cannot drop {peak_length - length} tokens; "
                "create it with a larger slack"
            )
        self.pending = None

    def restore(self, key: Tensor, value: Tensor, length: int) -> None:
        """Use buffers that were saved with `length` tokens. Raise ValueError if they do not fit."""
        fits = key.ndim == value.ndim == 4 and key.shape[2] == value.shape[2]
        if not fits or not self.num_slots(length) <= key.shape[2] <= self.size:
            raise ValueError(
                f"keys {tuple(key.shape)} and values {tuple(value.shape)} do not fit {length} tokens in a ring of "
                f"{self.size} slots"
            )
        self.key, self.value = key, value

    def num_bytes(self, length: int) -> int:
        """Return the bytes that the ring occupies after `length` tokens."""
        return self.bytes_for(min(length, self.size))
