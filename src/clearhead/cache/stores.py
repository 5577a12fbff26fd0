"""Where one layer keeps its keys and values: contiguous or sliding, both behind `write` and `slots`.

    store = ContiguousStore(); k, v = store.write(length, k, v)     # (B, K, T, H) in, (B, K, S, H) out

`length` is how many tokens came before. `slots` names the tokens that `write` gives back, in its order, so that
the mask is made for exactly these. Writing the same place twice is harmless: only `KeyValueCache.advance` moves on.
Latent attention keeps its latent as the key and its rotary key as the value; widths are whatever comes first.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from clearhead.errors import ClearheadError

EMPTY = -1  # a slot that holds no token yet


class Store(Protocol):
    key: Tensor | None
    value: Tensor | None

    def reserve(
        self, length: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> "Place": ...
    def write(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]: ...
    def slots(self, length: int, num_new: int) -> Tensor: ...
    def advance(self) -> None: ...
    def select(self, rows: Tensor) -> "Store": ...
    def reorder(self, rows: Tensor, length: int) -> None: ...
    def truncate(self, length: int, kept: int) -> None: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def restore(self, key: Tensor, value: Tensor, length: int) -> None: ...
    def num_bytes(self, length: int) -> int: ...


class Place(NamedTuple):
    """Where a kernel writes one new token, and how many slots it then looks at."""

    key: Tensor  # (B, K, capacity, H)
    value: Tensor
    slot: int
    num_slots: int


class Buffers:
    """A key and a value tensor (B, K, slots, H), made when the first come in."""

    key: Tensor | None = None
    value: Tensor | None = None

    def advance(self) -> None:
        """The tokens last written are now the past."""

    def reorder(self, rows: Tensor, length: int) -> None:
        assert not self.tensors() or len(rows) == len(next(iter(self.tensors().values()))), "a row for each there is"
        for buffer in self.tensors().values():  # what comes after `length` is written before it is read
            buffer[:, :, :length] = buffer[:, :, :length].index_select(0, rows)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.key is None or self.value is None else {"key": self.key, "value": self.value}

    def bytes_of(self, num_tokens: int) -> int:
        slots = self.tensors().values()
        return sum(t.shape[0] * t.shape[1] * num_tokens * t.shape[3] * t.element_size() for t in slots)


class ContiguousStore(Buffers):
    """Every token in order, in a buffer that doubles when full; what is attended is a view of it, never a copy."""

    def __init__(self, capacity: int = 64):
        self.capacity = capacity

    def write(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = length + key.shape[2]
        held_key, held_value = self.room(length, end, key, value)
        held_key[:, :, length:end] = key
        held_value[:, :, length:end] = value
        return held_key[:, :, :end], held_value[:, :, :end]

    def room(self, length: int, end: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers for `end` tokens; where memory runs out, both stay as they were."""
        if self.key is not None and self.value is not None and end <= self.key.shape[2]:
            return self.key, self.value
        capacity = self.capacity
        while capacity < end:
            capacity *= 2
        self.key, self.value = grown(self.key, key, length, capacity), grown(self.value, value, length, capacity)
        self.capacity = capacity
        return self.key, self.value

    def reserve(self, length: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Place:
        """Room for one token of `shape` (B, K, H), for whoever writes it himself."""
        like = torch.empty(*shape[:2], 0, shape[2], dtype=dtype, device=device)
        return Place(*self.room(length, length + 1, like, like), length, length + 1)

    def slots(self, length: int, num_new: int) -> Tensor:
        return torch.arange(length + num_new)

    def select(self, rows: Tensor) -> "ContiguousStore":
        other = ContiguousStore(self.capacity)
        if self.key is not None and self.value is not None:
            other.key, other.value = self.key[rows], self.value[rows]
        return other

    def truncate(self, length: int, kept: int) -> None:
        """Later slots are overwritten by what comes next."""

    def restore(self, key: Tensor, value: Tensor, length: int) -> None:
        if key.ndim != 4 or value.ndim != 4 or not length <= key.shape[2] == value.shape[2]:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} for {length} tokens")
        self.key, self.value, self.capacity = key, value, max(key.shape[2], 1)

    def num_bytes(self, length: int) -> int:
        return self.bytes_of(length)


def grown(buffer: Tensor | None, new: Tensor, length: int, capacity: int) -> Tensor:
    """`capacity` slots for keys like `new`, the first `length` of them from `buffer`."""
    larger = new.new_zeros(*new.shape[:2], capacity, new.shape[3])
    if buffer is not None:
        larger[:, :, :length] = buffer[:, :, :length]
    return larger


class SlidingStore(Buffers):
    """The last `window` tokens in a ring: token t stands in slot t mod size. Memory does not grow with the text.

    A ring of window + slack slots can go back by `slack` tokens, and takes that many more at once in place.
    """

    def __init__(self, window: int, slack: int = 16):
        self.window, self.slack = window, slack
        self.size = window + slack
        self.next: tuple[Tensor, Tensor] | None = None  # the ring once the tokens last written are the past

    def write(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key is None or self.value is None:
            self.key = key.new_zeros(*key.shape[:2], self.size, key.shape[3])
            self.value = value.new_zeros(*value.shape[:2], self.size, value.shape[3])
        num_new = key.shape[2]
        if self.fits(num_new):
            place = torch.arange(length, length + num_new, device=key.device) % self.size
            self.key[:, :, place], self.value[:, :, place] = key, value
            self.next = None
            return self.key, self.value
        seen = torch.cat((self.key, key), dim=2), torch.cat((self.value, value), dim=2)
        last = min(num_new, self.size)
        place = torch.arange(length + num_new - last, length + num_new, device=key.device) % self.size
        self.next = self.key.clone(), self.value.clone()
        self.next[0][:, :, place], self.next[1][:, :, place] = key[:, :, -last:], value[:, :, -last:]
        return seen

    def reserve(self, length: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Place:
        if self.key is None or self.value is None:
            self.key = torch.zeros(*shape[:2], self.size, shape[2], dtype=dtype, device=device)
            self.value = torch.zeros_like(self.key)
        self.next = None
        return Place(self.key, self.value, length % self.size, self.size)

    def advance(self) -> None:
        if self.next is not None:
            (self.key, self.value), self.next = self.next, None

    def fits(self, num_new: int) -> bool:
        """The first new token still finds its whole window after the last one is written."""
        return num_new <= self.slack + 1

    def slots(self, length: int, num_new: int) -> Tensor:
        held = self.ring(length + num_new if self.fits(num_new) else length)
        return held if self.fits(num_new) else torch.cat((held, torch.arange(length, length + num_new)))

    def ring(self, length: int) -> Tensor:
        """The token in each slot after `length` tokens: the latest t < length with t mod size = slot."""
        slot = torch.arange(self.size)
        latest = length - 1 - (length - 1 - slot) % self.size
        return torch.where(latest >= 0, latest, EMPTY)

    def select(self, rows: Tensor) -> "SlidingStore":
        other = SlidingStore(self.window, self.slack)
        if self.key is not None and self.value is not None:
            other.key, other.value = self.key[rows], self.value[rows]
        return other

    def truncate(self, length: int, kept: int) -> None:
        if length - kept > self.slack and kept > 0:
            raise ClearheadError(
                f"a sliding cache can go back by {self.slack} tokens, not {length - kept}; keep a larger slack"
            )
        self.next = None

    def restore(self, key: Tensor, value: Tensor, length: int) -> None:
        if key.ndim != 4 or value.ndim != 4 or not key.shape[2] == value.shape[2] == self.size:
            raise ValueError(f"keys {tuple(key.shape)} and values {tuple(value.shape)} for a ring of {self.size}")
        self.key, self.value = key, value

    def num_bytes(self, length: int) -> int:
        return self.bytes_of(min(length, self.size))
