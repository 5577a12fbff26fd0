"""Layers as the CUDA graph reads them: a lowered block, its cache and its rotation table, all at fixed addresses.

layer = build_layer(block, ContiguousStore(), num_cached=0, shape=(1, 1024), tables={})
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.architecture import GroupedAttention, Rope
from clearhead.backends.lowering import LoweredBlock, lower_block, rotation_table
from clearhead.cache import ContiguousStore
from clearhead.model import Block


@dataclass(frozen=True)
class GraphLayer:
    """A block and the buffers that a captured graph reads and writes."""

    block: LoweredBlock
    keys: Tensor  # (B, K, capacity, H)
    values: Tensor
    cosine: Tensor  # (capacity, rotary_pairs)
    sine: Tensor


RotationTables = dict[GroupedAttention, tuple[Tensor, Tensor]]  # shared by layers with equal attention configs


def build_layer(
    block: Block, store: ContiguousStore, num_cached: int, shape: tuple[int, int], tables: RotationTables
) -> GraphLayer:
    """Lower a block and give it a cache of at least `shape` (batch, tokens).

    The first `num_cached` tokens of the store are kept. `tables` collects the rotation tables of all layers.
    """
    config, parameter = block.layer.attention, next(block.parameters())
    assert isinstance(config, GroupedAttention)
    empty = parameter.new_empty(shape[0], config.num_kv_heads, 0, config.head_width)
    keys, values = store.ensure_capacity(num_cached, shape[1], empty, empty)
    return GraphLayer(lower_block(block), keys, values, *_shared_rotation_table(config, keys, tables))


def with_capacity(
    layer: GraphLayer, store: ContiguousStore, num_cached: int, capacity: int, tables: RotationTables
) -> GraphLayer:
    """Return the layer with a cache of `capacity` tokens, of which the first `num_cached` are copied."""
    keys, values = store.ensure_capacity(num_cached, capacity, layer.keys, layer.values)
    cosine, sine = _shared_rotation_table(layer.block.attention.config, keys, tables)
    return replace(layer, keys=keys, values=values, cosine=cosine, sine=sine)


def _shared_rotation_table(config: GroupedAttention, keys: Tensor, tables: RotationTables) -> tuple[Tensor, Tensor]:
    """Return the rotation table for all slots of `keys`, or empty tensors without rotary positions."""
    if not isinstance(config.position, Rope):
        return torch.zeros(0, 0, device=keys.device), torch.zeros(0, 0, device=keys.device)
    if config not in tables:
        tables[config] = rotation_table(config, keys.shape[2], keys.device)
    return tables[config]
