"""Keys and values of a page pool, (num_pages, K, page_size, H) per layer: the slots of one head in a page are adjacent.

    storage = PageStorage(PagePool(num_pages=64, page_size=16)); storage.write(layer, slots, key, value)

A slot is page · page_size + offset in the page. page_pool.py decides which token has which slot.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from clearhead.architecture import GroupedAttention, LatentAttention, Stack
from clearhead.cache.key_value_cache import key_value_shape
from clearhead.cache.page_pool import PagePool


@dataclass
class PageStorage:
    """For each layer the keys and the values of all pages."""

    pool: PagePool
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # The plan of the CPU kernels that wrote last, as in KeyValueCache.
    last_writer: object = None

    @staticmethod
    def for_stack(stack: Stack, pool: PagePool, dtype: torch.dtype, device: torch.device) -> "PageStorage":
        """Allocate the keys and values of every layer of a decoder."""
        return PageStorage(pool, _allocate([layer.attention for layer in stack.layers], pool, dtype, device))

    @staticmethod
    def for_sources(stack: Stack, pool: PagePool, dtype: torch.dtype, device: torch.device) -> "PageStorage":
        """Allocate the keys and values of the cross-attention of every layer of a decoder."""
        attentions = [layer.cross_attention for layer in stack.layers if layer.cross_attention is not None]
        return PageStorage(pool, _allocate(attentions, pool, dtype, device))

    def layer_tensors(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensors of a layer, allocated on first use for keys and values like these (..., K, T, H)."""
        if layer not in self.layers:
            pages, size = self.pool.num_pages, self.pool.page_size
            keys, values = (new.new_zeros(pages, new.shape[-3], size, new.shape[-1]) for new in (key, value))
            self.layers[layer] = keys, values
        return self.layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values (T, K, H) in the slots (T,)."""
        size = self.pool.page_size
        for tensor, new in zip(self.layers[layer], (key, value), strict=True):
            tensor[slots // size, :, slots % size] = new

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (..., K, H) of the slots (...)."""
        size = self.pool.page_size
        keys, values = self.layers[layer]
        return keys[slots // size, :, slots % size], values[slots // size, :, slots % size]

    def copy_page(self, source: int, destination: int) -> None:
        """Copy one page to another in all layers (`PageCopy`)."""
        for tensors in self.layers.values():
            for tensor in tensors:
                tensor[destination] = tensor[source]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages, whether they are used or not."""
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers.values() for tensor in pair)


def _allocate(
    attentions: Sequence[GroupedAttention | LatentAttention], pool: PagePool, dtype: torch.dtype, device: torch.device
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return empty pages for the keys and values of each layer."""
    layers = {}
    for number, attention in enumerate(attentions):
        heads, *widths = key_value_shape(attention)
        keys, values = (_zeros((pool.num_pages, heads, pool.page_size, width), dtype, device) for width in widths)
        layers[number] = keys, values
    return layers


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros, on a CPU in memory that the system provides page by page when it is first written.

    torch.zeros would write all of it at once: 0.4 s for a gigabyte.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
