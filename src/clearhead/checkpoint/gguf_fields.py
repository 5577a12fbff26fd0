"""Split the bytes of GGUF blocks into fields: the building blocks of gguf_blocks.py and gguf_codebooks.py.

quants = bit_planes(blocks[:, 2:18], 4)      # (num_blocks, 2, 16): the low and the high halves of 16 bytes
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class BlockParts(NamedTuple):
    """The parts of blocks; their values are `quants * scales + offsets`."""

    quants: NDArray[np.int8]  # (num_blocks, G, values per group)
    scales: NDArray[np.float32]  # (num_blocks, G, 1)
    offsets: NDArray[np.float32] | None  # (num_blocks, G, 1)


class LevelParts(NamedTuple):
    """The parts of blocks with two levels of scales: that of the block, and integers of groups that multiply it."""

    quants: NDArray[np.int8]  # (num_blocks, G, values per group)
    block_scales: NDArray[np.float32]  # (num_blocks, 1, 1)
    group_scales: NDArray[np.int8] | Bytes  # (num_blocks, G)
    block_offsets: NDArray[np.float32] | None = None  # (num_blocks, 1, 1)
    group_offsets: NDArray[np.int8] | Bytes | None = None  # (num_blocks, G)

    def multiplied(self) -> BlockParts:
        """Return the same blocks with the scale and the offset of each group."""
        offsets = None
        if self.block_offsets is not None and self.group_offsets is not None:
            offsets = self.block_offsets * self.group_offsets[..., None]
        return BlockParts(self.quants, self.block_scales * self.group_scales[..., None], offsets)


def halves(blocks: Bytes, byte: int) -> NDArray[np.float32]:
    """Return the float16 at `byte` of every block as (num_blocks, 1, 1) float32."""
    return blocks[:, byte : byte + 2].view(np.float16).astype(np.float32)[..., None]


def bit_planes(packed: Bytes, width: int) -> NDArray[np.int8]:
    """(..., n) bytes -> (..., 8 // width, n): split every byte into fields of `width` bits, low bits first."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return ((packed[..., None, :] >> shifts) & np.uint8(2**width - 1)).view(np.int8)


def one_group(quants: NDArray[np.int8]) -> NDArray[np.int8]:
    """(num_blocks, ...) -> (num_blocks, 1, values): treat all values of a block as one group."""
    return quants.reshape(len(quants), 1, -1)
