"""Bytes that a token moves, and how fast this machine reads: together the limit of decoding.

seconds = (weights_read(network) + cache_read(config, length, element_bytes=2)) / read_bandwidth("cpu")
"""

import time

import torch
from torch import nn

from clearhead.architecture import Chunked, Layer, ModelConfig, SlidingWindow
from clearhead.backends import PackedTable
from clearhead.cache import cached_shape
from clearhead.model import MixtureLayer, Transformer

# Beyond any cache of a processor; on a GPU long enough that the start of a kernel does not count.
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
TRIES = 5


def weights_read(network: Transformer) -> int:
    """By one token: of a table in which it is only looked up nothing to speak of, of experts the chosen ones."""
    assert network.decoder is not None
    tied = network.head is not None and network.head.weight is None
    head_table = network.decoder.embedding.tokens if tied else None
    total, shares = 0.0, dict[object, float]()
    for module in network.modules():
        if isinstance(module, nn.Embedding | PackedTable) and module is not head_table:
            continue
        if isinstance(module, MixtureLayer):  # experts are its own parameters, or packed, modules in it
            share = module.config.num_chosen / module.config.num_experts
            shares |= dict.fromkeys((module, module.gate, module.up, module.down), share)
        total += shares.get(module, 1.0) * own_bytes(module)
    return int(total)


def weights_held(network: Transformer) -> int:
    return sum(own_bytes(module) for module in network.modules())


def own_bytes(module: nn.Module) -> int:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cache_read(config: ModelConfig, length: int, element_bytes: int) -> int:
    """By a token that comes after `length` others."""
    assert config.decoder is not None
    return sum(layer_elements(layer, length) for layer in config.decoder.layers) * element_bytes


def layer_elements(layer: Layer, length: int) -> int:
    pattern = layer.attention.pattern
    seen = min(length, pattern.size) if isinstance(pattern, SlidingWindow | Chunked) else length
    heads, key_width, value_width = cached_shape(layer.attention)
    return seen * heads * (key_width + value_width)


@torch.inference_mode()
def read_bandwidth(device: torch.device | str, num_bytes: int | None = None) -> float:
    """Bytes per second of a matrix-vector product, which reads a matrix once; the best of a few."""
    kind = torch.device(device).type
    rows = (num_bytes or READ_BYTES.get(kind, READ_BYTES["cpu"])) // (4 * 4096)
    matrix, vector = torch.ones(rows, 4096, device=device), torch.ones(4096, device=device)
    best = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        (matrix @ vector)[0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - start)
    return matrix.numel() * 4 / best
