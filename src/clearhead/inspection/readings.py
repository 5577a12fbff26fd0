"""What attention does, in numbers: how spread out it is, and which known pattern a head follows.

    entropy = attention_entropy(trace, layer=3)   # (N, T) nats: 0 looks at one token, ln(n) at n alike

Heads are compared by one number each; a list of layers, each (N,).
"""

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.trace import Trace


def attention_entropy(trace: Trace, layer: int, stack: str | None = None) -> Tensor:
    """-Σ w ln w of each head and query (N, T), in nats."""
    return torch.special.entr(trace.attention(layer, stack=stack).float()).sum(dim=-1)


def previous_token_scores(trace: Trace, stack: str | None = None) -> list[Tensor]:
    """How much of its attention each head gives to the token just before, on average."""
    if len(tokens_of(trace, stack)) < 2:
        raise ClearheadError("the text has one token; a token before another needs two")
    return [weights.diagonal(offset=-1, dim1=1, dim2=2).mean(dim=1) for weights in all_weights(trace, stack)]


def induction_scores(trace: Trace, stack: str | None = None) -> list[Tensor]:
    """How much of its attention each head gives to what followed the same token earlier, on average.

    "A B … A" looks at B (Elhage et al. 2021; Olsson et al. 2022). Over the tokens that occurred before; a text of
    random tokens said twice shows it best.
    """
    tokens = torch.tensor(tokens_of(trace, stack))
    earlier = (tokens[:, None] == tokens[None]).tril(diagonal=-1)  # (T, S): key is an earlier same token
    followers = earlier.roll(1, dims=1)  # no row's last entry is set, so nothing comes round
    repeated = earlier.any(dim=1)
    if not repeated.any():
        raise ClearheadError("no token occurs twice in this text; induction shows where something is repeated")
    found = [weights[:, repeated] * followers[repeated].to(weights.device) for weights in all_weights(trace, stack)]
    return [weights.sum(dim=-1).mean(dim=1) for weights in found]


def rollout(trace: Trace, stack: str | None = None) -> Tensor:
    """How much of each token reaches each place through all layers (T, T), rows sum to 1.

    Half of a layer's output is taken to be the stream itself, half the mean over its heads (Abnar & Zuidema 2020).
    """
    length = len(tokens_of(trace, stack))
    mixed = torch.eye(length)
    for weights in all_weights(trace, stack):
        mixed = (weights.float().mean(dim=0).cpu() + torch.eye(length)) / 2 @ mixed
    return mixed


def all_weights(trace: Trace, stack: str | None) -> list[Tensor]:
    return [trace.attention(layer, stack=stack) for layer in range(trace.num_layers_of(stack))]


def tokens_of(trace: Trace, stack: str | None) -> list[int]:
    across = trace.config.is_encoder_decoder and stack == "encoder"
    return (trace.source_tokens or []) if across else trace.tokens
