"""Describe which part of a tensor a process holds.

TensorSlice.along(0, (16, 8), start=4, length=4, full_length=16)     # rows 4 to 7 of a (16, 8) tensor
"""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class TensorSlice:
    """A block of `shape` that begins at `start` of a tensor of `full_shape`."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether the slice covers the whole tensor."""
        return self.shape == self.full_shape

    @classmethod
    def full(cls, shape: tuple[int, ...]) -> Self:
        """Return the slice that covers a whole tensor."""
        return cls((0,) * len(shape), tuple(shape), tuple(shape))

    @classmethod
    def along(cls, axis: int, shape: tuple[int, ...], start: int, length: int, full_length: int) -> Self:
        """Return a slice of `length` along one axis that covers all other axes; their sizes are those of `shape`."""

        def with_axis(value: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes[:axis], value, *sizes[axis + 1 :])

        return cls(with_axis(start, (0,) * len(shape)), with_axis(length, shape), with_axis(full_length, shape))
