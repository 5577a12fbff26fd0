"""Lower a block: collect its weights and settings in the form that the kernels of both backends read.

    lowered = lower_block(block); lowered.query_key_value.shape      # ((N + 2K) H, D)

Weights that multiply the same input are merged into one matrix, so that a kernel reads them in one pass:

    x -> norm -> query_key_value -> attention -> attention_output -> branch norm -> + x
    x -> norm -> gate_and_up -> activation(gate) · up -> down -> branch norm -> + x

No weight is stored twice: after merging, the modules hold views of the merged matrix. Their parameters stay the same
objects, so that an optimizer created earlier still trains them.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.architecture import Activation, FeedForward, GateClamp, GroupedAttention, LatentAttention, Rope
from clearhead.backends.lowering_norms import HeadNormSettings, lower_head_norms
from clearhead.backends.lowering_scores import find_relative_bias
from clearhead.backends.modules import PackedLinear, PackedMatrix
from clearhead.backends.packed import PackedWeight, packed_from_tensors
from clearhead.model import (
    Attention,
    Block,
    FeedForwardLayer,
    Residual,
    Transformer,
    Xielu,
    make_rotation,
)

LinearModule = nn.Linear | PackedLinear


@dataclass(frozen=True)
class PackedParts:
    """Packed weights of different formats, one below the other: (N, K)."""

    parts: tuple[PackedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        return sum(part.num_bytes for part in self.parts)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Dequantize to (N, K)."""
        return torch.cat([part.unpack(dtype) for part in self.parts])


@dataclass(frozen=True)
class Projection:
    """A weight (N, K), plain or packed, and its bias (N,)."""

    weight: Tensor | PackedWeight | PackedParts
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of the weight, without the bias."""
        weight = self.weight
        return weight.numel() * weight.element_size() if isinstance(weight, Tensor) else weight.num_bytes

    def plain_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, unpacked to `dtype` if it is packed."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight.unpack(dtype)


@dataclass(frozen=True)
class LoweredAttention:
    """Settings of an attention layer; sizes, pattern and position are in its config."""

    config: GroupedAttention
    scale: float
    query_norm: nn.Module  # nn.Identity if queries are not normalized
    key_norm: nn.Module
    rotary_pairs: int  # pairs of entries that are rotated in each head; 0 without rotary positions
    interleaved: bool  # pairs are (2j, 2j + 1); otherwise (j, j + rotary_pairs)
    sinks: Tensor | None
    relative_bias: nn.Embedding | None  # of T5's buckets; layers may share it
    head_norms: HeadNormSettings  # query_norm and key_norm, or norms without modules, and where they are applied


@dataclass(frozen=True)
class LoweredActivation:
    """The activation of a feed-forward branch, with the numbers that some have."""

    name: Activation
    clamp: GateClamp | None = None
    xielu: Xielu | None = None


@dataclass(frozen=True)
class LoweredCrossAttention:
    """Cross-attention of a block. Keys and values come precomputed with the encoder output."""

    attention: LoweredAttention
    query: Projection
    output: Projection
    residual: Residual


@dataclass(frozen=True)
class LoweredBlock:
    """All weights and settings of one block. The residual modules hold the norms around each branch."""

    placement: str  # of the norms: a Placement of architecture/config.py
    branch_scale: float  # multiplies what a branch adds to the residual stream
    attention: LoweredAttention
    query_key_value: Projection  # rows of the query, key and value projections, ((N + 2K) H, D)
    attention_output: Projection
    attention_residual: Residual
    cross_attention: LoweredCrossAttention | None
    gated: bool
    activation: LoweredActivation
    gate_and_up: Projection  # rows of the gate, if there is one, and of the up projection
    down: Projection
    feed_forward_residual: Residual

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The four projections of a block without cross-attention."""
        return self.query_key_value, self.attention_output, self.gate_and_up, self.down


def lower_block(block: Block, *, keep_formats: bool = False, shared_bias: nn.Module | None = None) -> LoweredBlock:
    """Collect the weights and settings of a block that `capability.unsupported_reason` accepts; merge its weights.

    With `keep_formats`, packed queries, keys and values of different formats become PackedParts; otherwise they are
    unpacked to be merged. `shared_bias` is the table of biases that the layers of a stack share.
    """
    attention, feed_forward, config = block.attention, block.feed_forward, block.layer.feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForwardLayer)
    assert isinstance(config, FeedForward)
    cross = None
    if block.layer.cross_attention is not None:
        module = cast(Attention, block.cross_attention)
        cross = LoweredCrossAttention(
            lower_attention(module),
            merge_projections(module.query),
            merge_projections(module.output),
            block.cross_attention_residual,
        )
    gate_and_up = (feed_forward.up,) if feed_forward.gate is None else (feed_forward.gate, feed_forward.up)
    return LoweredBlock(
        placement=block.layer.placement,
        branch_scale=block.layer.branch_scale,
        attention=lower_attention(attention, shared_bias),
        query_key_value=merge_projections(attention.query, attention.key, attention.value, keep_formats=keep_formats),
        attention_output=merge_projections(attention.output),
        attention_residual=block.attention_residual,
        cross_attention=cross,
        gated=feed_forward.gate is not None,
        activation=lower_activation(config, feed_forward),
        gate_and_up=merge_projections(*gate_and_up),
        down=merge_projections(feed_forward.down),
        feed_forward_residual=(
            block.attention_residual if block.layer.placement == "parallel" else block.feed_forward_residual
        ),
    )


def lower_activation(config: FeedForward, layer: FeedForwardLayer | None = None) -> LoweredActivation:
    """Return the activation of a feed-forward layer, or of experts, which have no module of their own."""
    activation = None if layer is None else layer.activation
    return LoweredActivation(config.activation, config.clamp, activation if isinstance(activation, Xielu) else None)


def lower_attention(attention: Attention, shared_bias: nn.Module | None = None) -> LoweredAttention:
    """Return the settings of an attention layer. `shared_bias` is the table that the layers of its stack share."""
    config = attention.config
    rope = config.position if isinstance(config.position, Rope) else None
    return LoweredAttention(
        config,
        attention.scale,
        attention.query_norm,
        attention.key_norm,
        rotary_pairs=0 if rope is None else (rope.width or config.head_width) // 2,
        interleaved=rope is not None and rope.pairing == "interleaved",
        sinks=attention.sinks,
        relative_bias=find_relative_bias(attention, shared_bias),
        head_norms=lower_head_norms(attention),
    )


def lower_head(network: Transformer) -> Projection:
    """Return the projection to logits: the weight of the head, or the token table that it is tied to."""
    head, stack = network.head, network.decoder
    assert stack is not None
    weight: Tensor | PackedMatrix = (
        stack.embedding.tokens.weight if head is None or head.weight is None else head.weight
    )
    return Projection(
        weight.packed if isinstance(weight, PackedMatrix) else weight.detach(), None if head is None else head.bias
    )


def rotation_table(
    config: GroupedAttention | LatentAttention, length: int, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, rotary_pairs) in float32 for the positions 0 to length - 1."""
    assert isinstance(config.position, Rope)
    positions = torch.arange(length, device=device)[None]
    width = config.head_width if isinstance(config, GroupedAttention) else config.rotary_width
    rotation = make_rotation(config.position, positions, width, torch.float32)
    return rotation.cosine[0, 0].contiguous(), rotation.sine[0, 0].contiguous()


# --- merging


def merge_projections(*modules: LinearModule, keep_formats: bool = False) -> Projection:
    """Return one projection with the rows of all modules, which then hold views of its weight and bias.

    With `keep_formats`, packed weights of different formats stay as they are.
    """
    packed = [module.packed for module in modules if isinstance(module, PackedLinear)]
    has_all_biases = len({module.bias is None for module in modules}) == 1
    if keep_formats and len(packed) == len(modules) and has_all_biases and len({each.format for each in packed}) > 1:
        return Projection(PackedParts(tuple(packed)), _merge_biases(modules))
    return Projection(merge_weights(modules), _merge_biases(modules))


def _merge_biases(modules: tuple[LinearModule, ...]) -> Tensor | None:
    """Return the biases of all modules, which then hold views of them; None if there are none."""
    biases = [module.bias for module in modules if module.bias is not None]
    merged = _concatenate_rows([bias.detach() for bias in biases]) if biases else None
    if merged is not None:
        for bias, part in zip(biases, merged.split([len(bias) for bias in biases]), strict=True):
            bias.data = part
    return merged


def merge_weights(modules: tuple[LinearModule, ...]) -> Tensor | PackedWeight:
    """Return one matrix with the rows of all weights, and let the modules hold views of it."""
    if len(modules) == 1:
        module = modules[0]
        return module.packed if isinstance(module, PackedLinear) else module.weight.detach().contiguous()
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    if len(packed) == len(modules) and len({module.packed.format for module in packed}) == 1:
        return _merge_packed_weights(packed)
    if packed:  # formats differ, so the merged weight is unpacked
        return torch.cat([module.weight.detach() for module in modules])
    plain = [module for module in modules if isinstance(module, nn.Linear)]
    merged = _concatenate_rows([module.weight.detach() for module in plain])
    for module, rows in zip(plain, merged.split([len(module.weight) for module in plain]), strict=True):
        module.weight.data = rows
    return merged


def _merge_packed_weights(modules: list[PackedLinear]) -> PackedWeight:
    parts = [module.packed for module in modules]
    names = parts[0].tensors
    merged = packed_from_tensors(
        {name: _concatenate_rows([part.tensors[name] for part in parts]) for name in names}, parts[0].columns
    )
    start = 0
    for module, part in zip(modules, parts, strict=True):
        module.set_packed(merged.rows(slice(start, start + part.shape[0])))
        start += part.shape[0]
    return merged


def _concatenate_rows(parts: list[Tensor]) -> Tensor:
    """Return all rows in one tensor: a copy, or a view if an earlier merge has placed the parts one after another."""
    for part, following in pairwise(parts):
        one_storage = part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
        if not one_storage or part.data_ptr() + part.nbytes != following.data_ptr() or not part.is_contiguous():
            return torch.cat(parts)
    return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())
