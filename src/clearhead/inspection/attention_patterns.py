"""Measure what attention heads do: how spread out their weights are, and which known patterns they follow.

    entropy = attention_entropy(trace, layer=3)   # (N, T) nats: 0 for one token, ln(n) for n tokens equally

Scores of heads are returned as a list with one tensor (N,) per layer.
"""

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.shares import attention_shares
from clearhead.inspection.trace import Trace


def attention_entropy(trace: Trace, layer: int, stack: str | None = None) -> Tensor:
    """Return the entropy -Σ w ln w of each head and query (N, T), in nats."""
    return torch.special.entr(trace.attention(layer, stack=stack).float()).sum(dim=-1)


def previous_token_scores(trace: Trace, stack: str | None = None) -> list[Tensor]:
    """Return, for each head, the mean attention weight that a token gives to the token before it."""
    if len(_stack_tokens(trace, stack)) < 2:
        raise ClearheadError("the text has one token; previous-token scores need at least two")
    return [weights.diagonal(offset=-1, dim1=1, dim2=2).mean(dim=1) for weights in _all_weights(trace, stack)]


def induction_scores(trace: Trace, stack: str | None = None) -> list[Tensor]:
    """Return, for each head, the mean attention weight given to what followed earlier occurrences of the same token.

    In "A B … A" an induction head attends from the second A to B (Elhage et al. 2021; Olsson et al. 2022). The mean
    is over the tokens that occurred before; a sequence of random tokens, repeated once, shows the pattern best.
    """
    tokens = torch.tensor(_stack_tokens(trace, stack))
    earlier = (tokens[:, None] == tokens[None]).tril(diagonal=-1)  # (T, S): the key is an earlier equal token
    followers = earlier.roll(1, dims=1)  # the last column is never set, so nothing wraps around
    repeated = earlier.any(dim=1)
    if not repeated.any():
        raise ClearheadError("no token occurs twice in this text; induction scores need a repeated token")
    products = [weights[:, repeated] * followers[repeated].to(weights.device) for weights in _all_weights(trace, stack)]
    return [product.sum(dim=-1).mean(dim=1) for product in products]


def specific_scores(trace: Trace, stack: str | None = None) -> list[Tensor]:
    """Return, for each head, the share of its attention that follows no trivial pattern (`attention_shares`)."""
    layers = range(trace.num_layers_of(stack))
    shares = [
        attention_shares(trace.attention(layer, stack=stack), trace.allowed(layer, stack), True) for layer in layers
    ]
    scores = [layer.specific for layer in shares if layer is not None]
    if len(scores) < len(shares):
        raise ClearheadError(
            f"{len(_stack_tokens(trace, stack))} tokens are too few; specific_scores needs at least five"
        )
    return scores


def attention_rollout(trace: Trace, stack: str | None = None) -> Tensor:
    """Return how much of each token reaches each position through all layers (T, T); rows sum to 1.

    The output of a layer is taken to be half the residual stream and half the mean over heads (Abnar & Zuidema 2020).
    """
    length = len(_stack_tokens(trace, stack))
    mixed = torch.eye(length)
    for weights in _all_weights(trace, stack):
        mixed = (weights.float().mean(dim=0).cpu() + torch.eye(length)) / 2 @ mixed
    return mixed


def _all_weights(trace: Trace, stack: str | None) -> list[Tensor]:
    """Return the attention weights (N, T, S) of every layer."""
    return [trace.attention(layer, stack=stack) for layer in range(trace.num_layers_of(stack))]


def _stack_tokens(trace: Trace, stack: str | None) -> list[int]:
    """Return the tokens that a stack read."""
    is_source = trace.config.is_encoder_decoder and stack == "encoder"
    return (trace.source_tokens or []) if is_source else trace.tokens
