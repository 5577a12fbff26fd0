"""Run a network as it is, fused kernel and compiled graph and all, and keep what its blocks were given.

    with listening(network) as heard: network.hidden(tokens)
    states = [pieces[0] for pieces in heard["decoder"]]   # L + 1 times (B, T, D): before each block, after the last

A listener takes a block's place instead of hooking it: a compiled graph does not look at hooks added later, but it
does see that another module stands there, and compiles once more, with the block inputs among its results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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
    """A block that keeps what it is given in `before`, and where it is the last what it gives in `after`."""

    def __init__(self, block: nn.Module, before: list[Tensor], after: list[Tensor] | None):
        super().__init__()
        self.block, self.before, self.after = block, before, after
        for name, part in block.named_children():  # a block's parts stay where others look for them
            self.add_module(name, part)

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.before.append(x)
        x = self.block(x, *rest, **named)
        if self.after is not None:
            self.after.append(x)
        return x


@contextmanager
def listening(network: Transformer) -> Iterator[dict[str, list[list[Tensor]]]]:
    """By stack L + 1 lists, with one entry for each forward meanwhile; whoever runs the network then is heard."""
    stacks = {name: stack for name in ("encoder", "decoder") if (stack := getattr(network, name)) is not None}
    blocks = {name: list(stack.layers) for name, stack in stacks.items()}
    heard: dict[str, list[list[Tensor]]] = {name: [[] for _ in range(len(blocks[name]) + 1)] for name in stacks}
    try:
        for name, stack in stacks.items():
            for number, block in enumerate(blocks[name]):
                last = number + 1 == len(blocks[name])
                stack.layers[number] = Listener(block, heard[name][number], heard[name][-1] if last else None)
        yield heard
    finally:
        for name, stack in stacks.items():
            for number, block in enumerate(blocks[name]):
                stack.layers[number] = block


@contextmanager
def resting(network: nn.Module) -> Iterator[None]:
    """Without dropout, also in the middle of training."""
    if not network.training:
        yield
        return
    network.eval()
    try:
        yield
    finally:
        network.train()


def run(network: Transformer, inputs: Inputs, source: Inputs | None = None) -> Tensor:
    """Last hidden states (1, T, D) of the stack that answers, as generation runs it."""
    memory = None if source is None else network.encode(source.tokens, source.mask)
    return network.hidden(
        inputs.tokens,
        inputs.mask,
        inputs.positions,
        token_types=inputs.token_types,
        documents=inputs.documents,
        memory=memory,
    )
