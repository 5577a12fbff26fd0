"""The feed-forward branch of a block (book C1).

    layer = FeedForwardLayer(FeedForward(width=256, activation="silu", gated=True), width=64); y = layer(x)

A layer is plain (ReLU, GELU) or gated (GeGLU, SwiGLU; Shazeer 2020):

    plain:  y = down(activation(up(x)))
    gated:  y = down(activation(gate(x)) · up(x)), with a clamp: down(activation(min(g, c)) · (clamp(u, ± c) + offset))
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Activation, FeedForward, GateClamp


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π)(x + 0.044715 x³)))."""
    if x.is_cuda and torch.compiler.is_compiling():
        # (1 + tanh u)/2 = σ(2u) compiles to fewer instructions: GPT-2's training step takes 1.3 % less time.
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return functional.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)² (So et al. 2021)."""
    return functional.relu(x).square()


def gelu_quick(x: Tensor) -> Tensor:
    """x · σ(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "relu_squared": relu_squared,
    "gelu": functional.gelu,  # x/2 · (1 + erf(x/√2))
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "silu": functional.silu,
    "tanh": torch.tanh,
}


class Xielu(nn.Module):
    """xIELU (Huang & Schlag 2024): a x² + b x if x > 0, else c (eˣ - 1 - x) + b x, where a and c are learned.

    a = softplus(positive) and c = b + softplus(negative), at first 0.8 each. Between `epsilon`, which is just below 0,
    and 0, the exponential is that of `epsilon`, as in the reference.
    """

    beta: Tensor
    epsilon: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Parameter(torch.full((1,), math.log(math.expm1(0.8))))
        self.negative = nn.Parameter(torch.full((1,), math.log(math.expm1(0.8 - 0.5))))
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("epsilon", torch.tensor(-1e-6))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return a and c."""
        return functional.softplus(self.positive), self.beta + functional.softplus(self.negative)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., F) -> (..., F)."""
        positive, negative = self.factors()
        below = (torch.expm1(torch.minimum(x, self.epsilon.to(x.dtype))) - x) * negative + self.beta * x
        return torch.where(x > 0, positive * x * x + self.beta * x, below)


def multiply_gate(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], clamp: GateClamp | None) -> Tensor:
    """Return activation(gate) · up (..., F), both limited by the clamp if there is one."""
    if clamp is None:
        return activation(gate) * up
    return activation(gate.clamp(max=clamp.limit)) * (up.clamp(-clamp.limit, clamp.limit) + clamp.up_offset)


class FeedForwardLayer(nn.Module):
    """Two linear layers with an activation between them, or three with a gate."""

    def __init__(self, config: FeedForward, width: int, dropout: float = 0.0):
        super().__init__()
        self.activation: Callable[[Tensor], Tensor]
        self.activation = Xielu() if config.activation == "xielu" else ACTIVATIONS[config.activation]
        self.clamp = config.clamp
        self.gate = nn.Linear(width, config.width, bias=config.bias) if config.gated else None
        self.up = nn.Linear(width, config.width, bias=config.bias)
        self.down = nn.Linear(config.width, width, bias=config.bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            hidden = multiply_gate(self.gate(x), self.up(x), self.activation, self.clamp)
        return self.down(self.dropout(hidden))  # hidden (..., F)
