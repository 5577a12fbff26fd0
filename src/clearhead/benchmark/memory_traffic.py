"""Bytes that a token reads, and the read bandwidth of this machine: together they bound the speed of decoding.

seconds = (weight_bytes_read(network) + cache_bytes_read(config, length, element_bytes=2)) / read_bandwidth("cpu")
"""

import time

import torch
from torch import nn

from clearhead.architecture import Chunked, Layer, ModelConfig, SlidingWindow
from clearhead.backends import PackedTable
from clearhead.cache import key_value_shape
from clearhead.model import MixtureLayer, Transformer

# Larger than any CPU cache; on a GPU long enough for the launch of a kernel not to matter.
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_NUM_TRIES = 5


def weight_bytes_read(network: Transformer) -> int:
    """Return the bytes of weights read for one token: nearly none of an embedding, and of experts the chosen ones."""
    assert network.decoder is not None
    tied = network.head is not None and network.head.weight is None
    head_table = network.decoder.token_embedding.tokens if tied else None
    total, fractions = 0.0, dict[object, float]()
    for module in network.modules():
        if isinstance(module, nn.Embedding | PackedTable) and module is not head_table:
            continue
        if isinstance(module, MixtureLayer):  # experts are its own parameters or, if packed, modules in it
            fraction = module.config.num_chosen / module.config.num_experts
            fractions |= dict.fromkeys((module, module.gate, module.up, module.down), fraction)
        total += fractions.get(module, 1.0) * _own_bytes(module)
    return int(total)


def total_weight_bytes(network: Transformer) -> int:
    """Return the bytes of all parameters and buffers."""
    return sum(_own_bytes(module) for module in network.modules())


def _own_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters and buffers, without those of its submodules."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cache_bytes_read(config: ModelConfig, length: int, element_bytes: int) -> int:
    """Return the bytes of cached keys and values that a token reads after `length` others."""
    assert config.decoder is not None
    return sum(_cache_elements_read(layer, length) for layer in config.decoder.layers) * element_bytes


def _cache_elements_read(layer: Layer, length: int) -> int:
    pattern = layer.attention.pattern
    num_keys = min(length, pattern.size) if isinstance(pattern, SlidingWindow | Chunked) else length
    heads, key_width, value_width = key_value_shape(layer.attention)
    return num_keys * heads * (key_width + value_width)


@torch.inference_mode()
def read_bandwidth(device: torch.device | str, num_bytes: int | None = None) -> float:
    """Return bytes per second of a matrix-vector product, which reads the matrix once; the best of a few tries."""
    device_type = torch.device(device).type
    rows = (num_bytes or READ_BYTES.get(device_type, READ_BYTES["cpu"])) // (4 * 4096)
    matrix, vector = torch.ones(rows, 4096, device=device), torch.ones(4096, device=device)
    best = float("inf")
    for _ in range(_NUM_TRIES):
        start = time.perf_counter()
        (matrix @ vector)[0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return matrix.numel() * 4 / best
