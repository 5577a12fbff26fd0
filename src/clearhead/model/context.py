"""Inputs of attention besides the hidden states, computed once per forward pass and shared by all equal layers.

    contexts = make_contexts(stack.layers, forward, relative_bias); x = block(x, contexts[layer.attention])

An `AttentionContext` holds the mask, the positions in the form this kind of attention uses (a rotation, a bias on the
scores, or relative encodings), the kernel and, with a cache, the function that writes keys and values to it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypedDict

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    Alibi,
    AttentionPattern,
    Disentangled,
    GroupedAttention,
    LatentAttention,
    Layer,
    RelativeBuckets,
    RelativeSinusoid,
    Rope,
    SinusoidalPositions,
)
from clearhead.model.attend import AttentionKernel
from clearhead.model.disentangled import DistanceTable, distance_rows
from clearhead.model.embedding import empty_embedding
from clearhead.model.masks import AttentionIndices, Mask, make_mask
from clearhead.model.positions import Rotation, alibi_bias, make_rotation, relative_position_bucket, sinusoids

AttentionConfig = GroupedAttention | LatentAttention
RelativeTable = nn.Embedding | DistanceTable
KeyValue = tuple[Tensor, Tensor]  # keys (B, K, S, H) and values (B, K, S, H of the values)

_RELATIVE_LAYOUT = SinusoidalPositions(layout="halves")  # of Transformer-XL's R


class Cache(Protocol):
    """Keys and values of past tokens, as the network sees them. The caller of the network advances it (cache/)."""

    def prepare(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Register new tokens (B, T) and return their positions (B or 1, T)."""

    def attention_indices(self, pattern: AttentionPattern) -> AttentionIndices:
        """Return the indices of the new tokens and of the keys stored for layers with this pattern."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> KeyValue:
        """Store the new keys and values (B, K, T, H) of a layer and return all of its keys and values (B, K, S, H)."""


@dataclass(frozen=True)
class EncoderOutput:
    """Encoder output that the decoder attends to."""

    states: Tensor  # hidden states (B, S, D)
    mask: Tensor | None = None  # (B, S), False for padding; None: no padding
    cross_keys_values: tuple[KeyValue, ...] | None = None  # of each decoder layer (precompute_cross_attention)
    target_documents: Tensor | None = None  # (B, T): packed targets attend only to the source with the same number
    source_documents: Tensor | None = None  # (B, S)

    def for_layer(self, layer: int) -> Tensor | KeyValue:
        """Return what the cross-attention of a layer takes: its keys and values if precomputed, else the states."""
        return self.states if self.cross_keys_values is None else self.cross_keys_values[layer]

    def select(self, indices: Tensor) -> "EncoderOutput":
        """Return the sequences at these batch indices, in this order. An index may be repeated."""
        assert self.target_documents is None, "packed sequences cannot be selected"
        cross_keys_values = None
        if self.cross_keys_values is not None:
            cross_keys_values = tuple((key[indices], value[indices]) for key, value in self.cross_keys_values)
        return EncoderOutput(self.states[indices], None if self.mask is None else self.mask[indices], cross_keys_values)

    @property
    def num_bytes(self) -> int:
        """Bytes of the precomputed cross-attention keys and values."""
        tensors = [tensor for pair in self.cross_keys_values or () for tensor in pair]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class StackOptions(TypedDict, total=False):
    """Keyword options of an encoder or decoder. LayerStack.forward describes them."""

    token_types: Tensor | None
    documents: Tensor | None
    kernel: AttentionKernel
    absorb: bool
    residuals: Mapping[int, list[Tensor]] | None


class DecoderOptions(StackOptions, total=False):
    """Keyword options of a forward pass that may continue a cache or attend to encoder output."""

    encoder_output: EncoderOutput | None
    cache: Cache | None


@dataclass(frozen=True)
class RelativeEncodings:
    """Transformer-XL's R, or DeBERTa's: one encoding per distance, and the distance of each query and key."""

    encodings: Tensor  # (M, D), for the M distances from the smallest to the largest, or their buckets
    index: Tensor  # (B or 1, 1, T, S), row of `encodings` for each query and key


@dataclass(frozen=True)
class AttentionContext:
    """Everything an attention layer needs besides its hidden states."""

    mask: Mask
    kernel: AttentionKernel
    query_index: Tensor  # (B or 1, T)
    rotation: Rotation | None = None
    bias: Tensor | None = None  # (B or 1, N, T, S)
    buckets: Tensor | None = None  # (B or 1, T, S), of RelativeBuckets with a table in each layer
    relative: RelativeEncodings | None = None
    absorb: bool = False  # latent attention: attend to the latent vectors without unfolding them
    write_cache: Callable[[Tensor, Tensor], KeyValue] | None = None  # `Cache.write` for this layer


@dataclass(frozen=True)
class ForwardContext:
    """What the attention contexts of all layers are computed from."""

    indices_for: Callable[[AttentionPattern], AttentionIndices]
    positions: Tensor  # (B or 1, T)
    width: int
    dtype: torch.dtype
    kernel: AttentionKernel
    absorb: bool


def build_relative_bias(layers: Iterable[Layer], width: int) -> RelativeTable | None:
    """Return the table that all layers share: of buckets (num_buckets, N; T5) or of distances (DeBERTa), or None."""
    for layer in layers:
        position = layer.attention.position
        if isinstance(position, Disentangled):
            return DistanceTable(position, width)
        if isinstance(position, RelativeBuckets) and not position.per_layer:
            return empty_embedding(position.num_buckets, layer.attention.num_heads)
    return None


def make_contexts(
    layers: Iterable[Layer], forward: ForwardContext, relative_bias: RelativeTable | None
) -> dict[AttentionConfig, AttentionContext]:
    """Return one context per distinct attention config. relative_bias is the table that all layers share."""
    indices: dict[AttentionPattern, AttentionIndices] = {}
    masks: dict[AttentionPattern, Mask] = {}
    contexts: dict[AttentionConfig, AttentionContext] = {}
    for attention in dict.fromkeys(layer.attention for layer in layers):
        pattern = attention.pattern
        if pattern not in masks:
            indices[pattern] = forward.indices_for(pattern)
            masks[pattern] = make_mask(pattern, indices[pattern])
        contexts[attention] = make_context(attention, indices[pattern], masks[pattern], forward, relative_bias)
    return contexts


def make_context(
    attention: AttentionConfig,
    indices: AttentionIndices,
    mask: Mask,
    forward: ForwardContext,
    relative_bias: RelativeTable | None,
) -> AttentionContext:
    """Turn positions into the form that one attention config uses, and return its context."""
    rotation, bias, buckets, relative = None, None, None, None
    match attention.position:
        case Rope() as rope:
            width = attention.head_width if isinstance(attention, GroupedAttention) else attention.rotary_width
            rotation = make_rotation(rope, forward.positions, width, forward.dtype)
        case RelativeBuckets() as config:
            buckets = relative_position_bucket(_query_key_distance(indices), config)
            if relative_bias is not None:
                bias = relative_bias(buckets).movedim(-1, 1)  # (B, T, S, N) -> (B, N, T, S)
        case Alibi() as alibi:
            bias = alibi_bias(_query_key_distance(indices), attention.num_heads, alibi, forward.dtype)
        case Disentangled() as config:
            assert isinstance(relative_bias, DistanceTable)
            rows = distance_rows(_query_key_distance(indices), config)
            relative = RelativeEncodings(relative_bias(), rows[:, None])
        case RelativeSinusoid():
            relative = _make_relative_encodings(_query_key_distance(indices), forward.width, forward.dtype)
    index, absorb = indices.query_index, forward.absorb
    return AttentionContext(mask, forward.kernel, index, rotation, bias, buckets, relative, absorb)


def _query_key_distance(indices: AttentionIndices) -> Tensor:
    """Return query index - key index, (B or 1, T, S)."""
    return indices.query_index[:, :, None] - indices.key_index[:, None, :]


def _make_relative_encodings(distance: Tensor, width: int, dtype: torch.dtype) -> RelativeEncodings:
    """Encode every distance that can occur: the T queries are the last of S tokens, so from 1 - T to S - 1."""
    num_queries, num_keys = distance.shape[-2:]
    smallest, count = 1 - num_queries, num_queries + num_keys - 1
    distances = torch.arange(smallest, smallest + count, device=distance.device)
    encodings = sinusoids(distances, width, _RELATIVE_LAYOUT, dtype)
    # The clamp is for queries that are padding; their distances may be outside, and nothing uses their output.
    return RelativeEncodings(encodings, (distance - smallest).clamp(0, count - 1)[:, None])
