"""Lower a block: collect its weights and settings in the form that the kernels of both backends read.

    lowered = lower_block(block); lowered.query_key_value.shape      # ((N + 2K) H, D)

Weights that multiply the same input are merged into one matrix, so that a kernel reads them in one pass
(lowering_projections.py):

    x -> norm -> query_key_value -> attention -> attention_output -> branch norm -> + x
    x -> norm -> gate_and_up -> activation(gate) · up -> down -> branch norm -> + x

A mixture of experts keeps the matrices of its experts as they are (lowering_feed_forward.py).
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.architecture import GroupedAttention, LatentAttention, Rope
from clearhead.backends.lowering_feed_forward import LoweredFeedForward, LoweredMixture, lower_feed_forward
from clearhead.backends.lowering_latent import LoweredLatent, cached_attention, lower_latent, merge_latent_inputs
from clearhead.backends.lowering_norms import HeadNormSettings, lower_head_norms
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.backends.lowering_scores import find_relative_bias
from clearhead.backends.modules import PackedMatrix
from clearhead.model import (
    Attention,
    Block,
    LatentAttentionLayer,
    Residual,
    Transformer,
    make_rotation,
)


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
    relative_bias: nn.Embedding | None  # the bias of each of T5's buckets; layers may share it
    head_norms: HeadNormSettings  # query_norm and key_norm, or norms without modules, and where they are applied


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

    placement: str  # where the norms are: a Placement of architecture/config.py
    branch_scale: float  # multiplies what a branch adds to the residual stream
    attention: LoweredAttention
    query_key_value: Projection  # rows of the query, key and value projections, ((N + 2K) H, D)
    attention_output: Projection
    attention_residual: Residual
    cross_attention: LoweredCrossAttention | None
    feed_forward: LoweredFeedForward | LoweredMixture
    feed_forward_residual: Residual
    latent: LoweredLatent | None = None  # query_key_value are then its queries, or compressed ones, and latents

    @property
    def dense(self) -> LoweredFeedForward:
        """The feed-forward branch of a block without experts."""
        assert isinstance(self.feed_forward, LoweredFeedForward)
        return self.feed_forward

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The four projections of a block without cross-attention and experts."""
        return self.query_key_value, self.attention_output, self.dense.gate_and_up, self.dense.down


def lower_block(block: Block, *, keep_formats: bool = False, shared_bias: nn.Module | None = None) -> LoweredBlock:
    """Collect the weights and settings of a block that `capability.unsupported_reason` accepts; merge its weights.

    With `keep_formats`, packed queries, keys and values of different formats become PackedParts; otherwise they are
    unpacked to be merged. `shared_bias` is the table of biases that the layers of a stack share.
    """
    cross = None
    if block.layer.cross_attention is not None:
        module = cast(Attention, block.cross_attention)
        cross = LoweredCrossAttention(
            lower_attention(module),
            merge_projections(module.query),
            merge_projections(module.output),
            block.cross_attention_residual,
        )
    attention, latent = block.attention, None
    if isinstance(attention, LatentAttentionLayer):
        inputs, latent = merge_latent_inputs(attention, keep_formats), lower_latent(attention)
    else:
        assert isinstance(attention, Attention)
        inputs = merge_projections(attention.query, attention.key, attention.value, keep_formats=keep_formats)
    return LoweredBlock(
        placement=block.layer.placement,
        branch_scale=block.layer.branch_scale,
        attention=lower_attention(attention, shared_bias),
        query_key_value=inputs,
        attention_output=merge_projections(attention.output),
        attention_residual=block.attention_residual,
        cross_attention=cross,
        feed_forward=lower_feed_forward(block.feed_forward, block.layer.feed_forward),
        feed_forward_residual=(
            block.attention_residual if block.layer.placement == "parallel" else block.feed_forward_residual
        ),
        latent=latent,
    )


def lower_attention(
    attention: Attention | LatentAttentionLayer, shared_bias: nn.Module | None = None
) -> LoweredAttention:
    """Return the settings of an attention layer. `shared_bias` is the table that the layers of its stack share.

    For latent attention, they are those of one head with what the cache holds of a token.
    """
    if isinstance(attention, LatentAttentionLayer):
        none, config = nn.Identity(), cached_attention(attention.config)
        pairs, pairing = attention.config.rotary_width // 2, attention.config.rope.pairing
        norms = HeadNormSettings(None, None)
        return LoweredAttention(config, attention.scale, none, none, pairs, pairing == "interleaved", None, None, norms)
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
        stack.token_embedding.tokens.weight if head is None or head.weight is None else head.weight
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
