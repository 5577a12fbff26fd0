"""Run a network as it is, fused kernel and compiled graph and all, and keep what some of its blocks were given.

    listening = Listening(network); listening.hidden(tokens)
    states = {depth: pieces[0] for depth, pieces in listening.heard["decoder"].items()}   # (B, T, D) each

The network itself stays untouched, so that whoever else runs it meanwhile is neither heard nor held up.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from clearhead.model import EncoderOutput, Scoring, Transformer, fused_attention


@dataclass(frozen=True)
class Inputs:
    """What a stack read; one row. Names and meaning as in model/transformer.py."""

    tokens: Tensor  # (1, T)
    mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    token_types: Tensor | None = None


class Listening(Transformer):
    """All parts of a network, and by stack and depth the stream before that layer (L: after the last), of each forward.

    sparsely: only every √L-th, so that at most √L layers lie between one that was heard and the next.
    """

    def __init__(self, network: Transformer, sparsely: bool = False):
        nn.Module.__init__(self)
        self.config, self.training = network.config, network.training
        self.encoder, self.decoder = network.encoder, network.decoder
        self.head, self.pooler = network.head, network.pooler
        self.residuals: dict[str, dict[int, list[Tensor]]] = {}
        for name, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack is not None:
                num_layers = len(stack.layers)
                step = math.ceil(math.sqrt(num_layers)) if sparsely else 1
                self.residuals[name] = {depth: [] for depth in (*range(0, num_layers, step), num_layers)}

    def hidden_states(self, *inputs: Any, **options: Any) -> Tensor:
        return super().hidden_states(
            *inputs, **options, residuals=self.residuals["encoder" if self.decoder is None else "decoder"]
        )

    def encode(self, *inputs: Any, **options: Any) -> EncoderOutput:
        return super().encode(*inputs, **options, residuals=self.residuals["encoder"])


@contextmanager
def resting(network: nn.Module) -> Iterator[None]:
    """Without dropout, also in the middle of training."""
    training = [part for part in network.modules() if part.training]
    network.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def run(network: Transformer, inputs: Inputs, source: Inputs | None = None) -> Tensor:
    """Last hidden states (1, T, D) of the stack that answers."""
    encoder_output = None if source is None else network.encode(source.tokens, source.mask, kernel=pytorch_kernel)
    return network.hidden_states(
        inputs.tokens,
        inputs.mask,
        inputs.positions,
        token_types=inputs.token_types,
        documents=inputs.documents,
        encoder_output=encoder_output,
        kernel=pytorch_kernel,
    )


def pytorch_kernel(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
    """`fused_attention` under a name of its own: a stack with faster kernels would exchange it, and what is made anew later, with
    PyTorch's, must be the same to the last bit."""
    return fused_attention(q, k, v, how)
