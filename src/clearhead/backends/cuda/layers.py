"""A network's layers as the CUDA graph reads them: matrices merged, the cache and the tables of angles in one place.

layer = static_layer(block, ContiguousStore(), kept=0, shape=(1, 1024), angles={}); head = head_of(network)
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.architecture import Activation, FeedForward, GroupedAttention, Rope
from clearhead.backends.cuda.launch import Matrix, Norm
from clearhead.backends.lowering import merge
from clearhead.backends.packed.modules import PackedLinear, PackedMatrix
from clearhead.cache import ContiguousStore
from clearhead.model import Attention, Block, FeedForwardLayer, Transformer, rotation_for


@dataclass(frozen=True)
class StaticLayer:
    projected: Matrix
    output: Matrix
    inner: Matrix
    down: Matrix
    attention_norm: Norm
    attention_branch_norm: nn.Module  # nothing, but for a sandwich
    feed_forward_norm: Norm
    feed_forward_branch_norm: nn.Module
    attention: Attention
    gated: bool
    activation: Activation
    keys: Tensor  # (B, K, capacity, H)
    values: Tensor
    cosine: Tensor  # (capacity, pairs)
    sine: Tensor

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.projected, self.output, self.inner, self.down


Angles = dict[GroupedAttention, tuple[Tensor, Tensor]]  # cosines and sines, of layers that turn alike


def static_layer(
    block: Block, store: ContiguousStore, kept: int, shape: tuple[int, int], angles: Angles
) -> StaticLayer:
    """With a cache of at least this `shape` (rows, tokens), of which the store holds the first `kept` tokens."""
    attention, feed_forward = block.attention, block.feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForwardLayer)
    config, like = attention.config, next(block.parameters())
    inner = (feed_forward.up,) if feed_forward.gate is None else (feed_forward.gate, feed_forward.up)
    blank = like.new_empty(shape[0], config.num_kv_heads, 0, config.head_width)
    keys, values = store.room(kept, shape[1], blank, blank)
    return StaticLayer(
        merged(attention.query, attention.key, attention.value),
        merged(attention.output),
        merged(*inner),
        merged(feed_forward.down),
        cast(Norm, block.attention_residual.norm),
        block.attention_residual.branch_norm,
        cast(Norm, block.feed_forward_residual.norm),
        block.feed_forward_residual.branch_norm,
        attention,
        feed_forward.gate is not None,
        cast(FeedForward, block.layer.feed_forward).activation,
        keys,
        values,
        *angles_of(config, keys, angles),
    )


def with_room(layer: StaticLayer, store: ContiguousStore, used: int, capacity: int, angles: Angles) -> StaticLayer:
    """The same layer, its cache with room for so many tokens; the first `used` are there."""
    keys, values = store.room(used, capacity, layer.keys, layer.values)
    cosine, sine = angles_of(layer.attention.config, keys, angles)
    return replace(layer, keys=keys, values=values, cosine=cosine, sine=sine)


def angles_of(config: GroupedAttention, keys: Tensor, known: Angles) -> tuple[Tensor, Tensor]:
    """For as many places as these keys have."""
    if not isinstance(config.position, Rope):
        return torch.zeros(0, 0, device=keys.device), torch.zeros(0, 0, device=keys.device)
    if config not in known:
        places = torch.arange(keys.shape[2], device=keys.device)[None]
        rotation = rotation_for(config.position, places, config.head_width, torch.float32)
        known[config] = rotation.cosine[0, 0].contiguous(), rotation.sine[0, 0].contiguous()
    return known[config]


def merged(*modules: nn.Linear | PackedLinear) -> Matrix:
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return Matrix(merge(modules), torch.cat(biases) if biases else None)


def head_of(network: Transformer) -> Matrix:
    """The logit head's own matrix, or the token table that it is tied to."""
    head, stack = network.head, network.decoder
    assert stack is not None
    own = stack.embedding.tokens.weight if head is None or head.weight is None else head.weight
    weight: Tensor | PackedMatrix = own
    return Matrix(
        weight.packed if isinstance(weight, PackedMatrix) else weight.detach(), None if head is None else head.bias
    )
