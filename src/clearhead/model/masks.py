"""Attention masks, computed once per forward pass and attention pattern from the indices of queries and keys.

    indices = AttentionIndices.from_slots(tokens, attention_mask=None); mask = make_mask(Causal(), indices)

True (1 below) means that the query in this row may attend to the key in this column. With T = S = 5:

    Causal      SlidingWindow(2)   Chunked(2)   Causal, 2 padding tokens on the left
    1 . . . .   1 . . . .          1 . . . .    . . . . .
    1 1 . . .   1 1 . . .          1 1 . . .    . . . . .
    1 1 1 . .   . 1 1 . .          . . 1 . .    . . 1 . .
    1 1 1 1 .   . . 1 1 .          . . 1 1 .    . . 1 1 .
    1 1 1 1 1   . . . 1 1          . . . . 1    . . 1 1 1

Indices and positions: rotations and position tables use a token's position; masks and distances use its index. The two
are equal unless the caller passes `position_ids`; then the index counts slots, padding included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.architecture import AttentionPattern, Bidirectional, Causal, CenteredWindow, Chunked, SlidingWindow
from clearhead.errors import require


@dataclass(frozen=True)
class Mask:
    """The keys that each query may attend to.

    `causal` without a tensor lets the fused kernel skip the upper half of the scores. Without either, every key is
    allowed.
    """

    allowed: Tensor | None = None  # bool, broadcastable to (B, 1, T, S)
    causal: bool = False

    def __post_init__(self) -> None:
        require(not (self.causal and self.allowed is not None), "a Mask takes either causal or allowed, not both")


@dataclass(frozen=True)
class AttentionIndices:
    """Indices of the queries and keys of one forward pass. Masks and distances are computed from them."""

    query_index: Tensor  # (B or 1, T)
    key_index: Tensor  # (B or 1, S)
    key_is_real: Tensor | None = None  # (B, S), False for padding; None: no padding
    query_document: Tensor | None = None  # (B, T), None: one document per sequence
    key_document: Tensor | None = None  # (B, S)

    first_index: Tensor | int = 0  # (B, 1), index of the first real token: chunks are counted from it
    contiguous_keys: bool = True  # the keys are all tokens up to the last query, in order

    @staticmethod
    def from_slots(tokens: Tensor, attention_mask: Tensor | None = None) -> "AttentionIndices":
        """Return the indices of full sequences (B, T) that attend to themselves, counted in slots."""
        index = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if attention_mask is None:
            return AttentionIndices(index, index)
        real = attention_mask.bool()
        return AttentionIndices(index, index, real, first_index=real.int().argmax(dim=1, keepdim=True))

    @staticmethod
    def from_positions(
        positions: Tensor, attention_mask: Tensor | None = None, documents: Tensor | None = None
    ) -> "AttentionIndices":
        """Return indices counted in positions (B or 1, T), so that padding does not increase any distance."""
        real = None if attention_mask is None else attention_mask.bool()
        return AttentionIndices(positions, positions, real, documents, documents)


def make_mask(pattern: AttentionPattern, indices: AttentionIndices) -> Mask:
    """Return the mask of an attention pattern, without a tensor where possible."""
    is_plain = indices.key_is_real is None and indices.query_document is None
    if is_plain and isinstance(pattern, Bidirectional):
        return Mask()
    if is_plain and isinstance(pattern, Causal) and indices.contiguous_keys:
        num_queries, num_keys = indices.query_index.shape[1], indices.key_index.shape[1]
        if num_queries == num_keys:
            return Mask(causal=True)
        if num_queries == 1:  # the last token attends to all tokens
            return Mask()
    allowed = pattern_mask(pattern, indices)
    if indices.key_is_real is not None:
        allowed = allowed & indices.key_is_real[:, None, :]
    if indices.query_document is not None and indices.key_document is not None:
        allowed = allowed & (indices.query_document[:, :, None] == indices.key_document[:, None, :])
    return Mask(allowed[:, None])  # (B, 1, T, S)


def pattern_mask(pattern: AttentionPattern, indices: AttentionIndices) -> Tensor:
    """Return the mask (B or 1, T, S) of the pattern alone, ignoring padding and documents."""
    query, key = indices.query_index[:, :, None], indices.key_index[:, None, :]
    match pattern:
        case Bidirectional():
            return torch.ones_like(query - key, dtype=torch.bool)
        case Causal():
            return key <= query
        case SlidingWindow(size=size):
            return (key <= query) & (query - key < size)
        case CenteredWindow(reach=reach):
            return (query - key).abs() <= reach
        case Chunked(size=size):
            start = torch.as_tensor(indices.first_index, device=query.device).reshape(-1, 1, 1)
            query_chunk = (query - start).div(size, rounding_mode="floor")
            key_chunk = (key - start).div(size, rounding_mode="floor")
            return (key <= query) & (query_chunk == key_chunk)


def cross_attention_mask(
    source_mask: Tensor | None, target_documents: Tensor | None = None, source_documents: Tensor | None = None
) -> Mask:
    """Return the mask of cross-attention: every query attends to every real source token (B, S).

    With documents (B, T) and (B, S), a query attends only to the source with the number of its own document.
    """
    allowed = None if source_mask is None else source_mask.bool()[:, None, None, :]
    if target_documents is not None and source_documents is not None:
        same = (target_documents[:, :, None] == source_documents[:, None, :])[:, None]  # (B, 1, T, S)
        allowed = same if allowed is None else allowed & same
    return Mask(allowed)


def resolve_positions(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, AttentionIndices]:
    """Return the positions (B or 1, T) of full sequences and the indices for their masks.

    Positions given by the caller affect rotations and embeddings only: the order of tokens still follows their slots.
    With packed documents, positions count from 0 in each document and also give the order.
    """
    if position_ids is not None and documents is None:
        return position_ids, AttentionIndices.from_slots(tokens, attention_mask)
    if position_ids is not None:
        positions = position_ids
    elif documents is not None:
        positions = _positions_in_documents(documents, attention_mask)
    else:
        positions = positions_from_mask(tokens, attention_mask)
    return positions, AttentionIndices.from_positions(positions, attention_mask, documents)


def positions_from_mask(tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the position of each token among the real tokens of its sequence (B or 1, T).

    Padding therefore never changes the position of a real token.
    """
    if attention_mask is None:
        return torch.arange(tokens.shape[1], device=tokens.device)[None]
    return (attention_mask.bool().cumsum(dim=1) - 1).clamp(min=0)


def _positions_in_documents(documents: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the position of each token among the real tokens of its document (B, T)."""
    same_document_before = (documents[:, :, None] == documents[:, None, :]).tril()
    if attention_mask is not None:
        same_document_before = same_document_before & attention_mask.bool()[:, None, :]
    return (same_document_before.sum(dim=-1) - 1).clamp(min=0)
