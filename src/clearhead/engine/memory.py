"""Decide how many pages an engine gets from the memory that is free.

    num_pages = pages_for_memory(config.output_stack, dtype, device, page_size=32, memory=None)

On the CPU, a page occupies memory only once it has been written to, because the system provides zeroed memory lazily.
"""

import os

import torch

from clearhead.architecture import Stack
from clearhead.cache import key_value_shape
from clearhead.errors import ClearheadError

_CPU_SHARE, _CPU_LIMIT = 0.25, 2 * 2**30  # share of the free memory, and maximum: a laptop runs other programs too
_GPU_SHARE = 0.8  # the rest is for activations, graphs and logits
_UNKNOWN = 4 * 2**30  # assumed where the system does not report its free memory


def bytes_per_token(stack: Stack, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token in all layers, and of one token of a source."""
    attentions = [each for layer in stack.layers for each in (layer.attention, layer.cross_attention)]
    shapes = [key_value_shape(attention) for attention in attentions if attention is not None]
    return sum(heads * (key + value) for heads, key, value in shapes) * dtype.itemsize


def pages_for_memory(
    stack: Stack, dtype: torch.dtype, device: torch.device, page_size: int, memory: int | None = None
) -> int:
    """Return the number of pages that fit into `memory` bytes; None: into a share of the memory that is free."""
    page_bytes = bytes_per_token(stack, dtype) * page_size
    available = default_memory(device) if memory is None else memory
    if available < page_bytes:
        raise ClearheadError(
            f"the keys and values of {page_size} tokens take {page_bytes:,} bytes, but the engine may use "
            f"{available:,}; give it more memory"
        )
    return available // page_bytes


def default_memory(device: torch.device) -> int:
    """Return the bytes of keys and values that an engine gets by default: a share of the memory that is free."""
    free = free_memory(device)
    return int(free * _GPU_SHARE) if device.type == "cuda" else min(int(free * _CPU_SHARE), _CPU_LIMIT)


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device, or a guess if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return _UNKNOWN
