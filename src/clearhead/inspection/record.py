"""Run a network as it is, fused kernel and compiled graph and all, and keep what some of its blocks were given.

    with listening(network) as heard: network.hidden(tokens)
    states = {depth: pieces[0] for depth, pieces in heard["decoder"].items()}   # (B, T, D) each

A listener takes a block's place instead of hooking it: a compiled graph does not look at hooks added later, but it
does see that another module stands there, and compiles once more, with the block inputs among its results.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from clearhead.model.attend import Scoring, fused
from clearhead.model.transformer import Transformer


@dataclass(frozen=True)
class Inputs:
    """What a stack read; one row. Names and meaning as in model/transformer.py."""

    tokens: Tensor  # (1, T)
    mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    token_types: Tensor | None = None


class Listener(nn.Module):
    """A block that keeps what it is given in `before` and what it gives in `after`, where there are such."""

    def __init__(self, block: nn.Module, before: list[Tensor] | None, after: list[Tensor] | None):
        super().__init__()
        self.block, self.before, self.after = block, before, after
        for name, part in block.named_children():  # a block's parts stay where others look for them
            self.add_module(name, part)

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        if self.before is not None:
            self.before.append(x)
        x = self.block(x, *rest, **named)
        if self.after is not None:
            self.after.append(x)
        return x


@contextmanager
def listening(network: Transformer, sparsely: bool = False) -> Iterator[dict[str, dict[int, list[Tensor]]]]:
    """By stack and depth the stream before that layer (L: after the last), once for each forward meanwhile.

    sparsely: only every √L-th, so that at most √L layers lie between one that was heard and the next.
    """
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(network, name)) is not None}
    blocks = {name: list(stack.layers) for name, stack in stacks.items()}
    heard: dict[str, dict[int, list[Tensor]]] = {}
    for name, layers in blocks.items():
        step = math.ceil(math.sqrt(len(layers))) if sparsely else 1
        heard[name] = {depth: [] for depth in (*range(0, len(layers), step), len(layers))}
    try:
        for name, stack in stacks.items():
            last = len(blocks[name]) - 1
            for number in {min(depth, last) for depth in heard[name]}:
                after = heard[name][last + 1] if number == last else None
                stack.layers[number] = Listener(blocks[name][number], heard[name].get(number), after)
        yield heard
    finally:
        for name, stack in stacks.items():
            for number, block in enumerate(blocks[name]):
                stack.layers[number] = block


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
    memory = None if source is None else network.encode(source.tokens, source.mask, kernel=pytorch_kernel)
    return network.hidden(
        inputs.tokens,
        inputs.mask,
        inputs.positions,
        token_types=inputs.token_types,
        documents=inputs.documents,
        memory=memory,
        kernel=pytorch_kernel,
    )


def pytorch_kernel(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
    """`fused` under a name of its own: a stack with faster kernels would exchange it, and what is made anew later, with
    PyTorch's, must be the same to the last bit."""
    return fused(q, k, v, how)
