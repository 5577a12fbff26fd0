"""Places in a network where a value can be heard or changed while it runs.

with changed(site(trace, layer=3, part="attention"), torch.zeros_like): logits = trace.run_again(-1)

stream         what a block is given            (1, T, D)
attention      what attention gives             (1, T, D)
head           one head, before the last matrix (1, T, H)
feed_forward   what the feed-forward gives      (1, T, D)
layer          what a block gives               (1, T, D)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError, unknown
from clearhead.inspection.heads import index
from clearhead.inspection.trace import Trace
from clearhead.model.block import Block
from clearhead.model.config import GroupedAttention

Part = Literal["stream", "attention", "feed_forward", "layer"]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    module: nn.Module
    at_input: bool
    columns: slice  # of the last dimension

    def change(self, x: Tensor, change: Change) -> Tensor:
        x = x.clone()
        x[..., self.columns] = change(x[..., self.columns])
        return x


def site(trace: Trace, layer: int, part: Part, head: int | None = None, stack: str | None = None) -> Site:
    name, layer = trace.place(layer, stack)
    block = cast(Block, trace.layer_stack(name).layers[layer])
    if part not in get_args(Part):
        raise unknown("part", part, get_args(Part))
    if head is not None:
        if part != "attention":
            raise ClearheadError(f"heads are parts of attention, not of {part}; leave out one of them")
        config = block.layer.attention
        width = config.value_width or cast(GroupedAttention, config).head_width
        first = index("head", head, trace.num_heads(layer, name)) * width
        return Site(cast(nn.Module, block.attention.output), at_input=True, columns=slice(first, first + width))
    if part in ("stream", "layer"):
        return Site(block, at_input=part == "stream", columns=slice(None))
    return Site(cast(nn.Module, getattr(block, part)), at_input=False, columns=slice(None))


@contextmanager
def changed(place: Site, change: Change) -> Iterator[None]:
    """`change` is given the value at the place, and what it gives takes its stead."""

    def at_input(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return place.change(given[0], change), *given[1:]

    def at_output(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        return place.change(out, change)

    if place.at_input:
        hook = place.module.register_forward_pre_hook(at_input)
    else:
        hook = place.module.register_forward_hook(at_output)
    try:
        with uncompiled():
            yield
    finally:
        hook.remove()


def uncompiled() -> AbstractContextManager[Any]:
    """Compiled graphs do not look at hooks added later. Where nothing was compiled, its 2 s of import are saved."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
