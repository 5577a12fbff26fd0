"""Places in a network where a value can be heard or changed while it runs.

logits = trace.run_again(-1, changed(trace.network, site(trace, layer=3, part="attention"), torch.zeros_like))

stream         what a block is given            (1, T, D)
attention      what attention gives             (1, T, D)
head           one head, before the last matrix (1, T, H)
feed_forward   what the feed-forward gives      (1, T, D)
layer          what a block gives               (1, T, D)
"""

from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from clearhead.architecture import GroupedAttention
from clearhead.errors import ClearheadError, unknown_name
from clearhead.inspection.heads import index
from clearhead.inspection.trace import Trace
from clearhead.model import Transformer

Part = Literal["stream", "attention", "feed_forward", "layer"]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    path: str  # of a module in the network, such as decoder.layers.3.attention
    at_input: bool
    columns: slice  # of the last dimension

    def change(self, x: Tensor, change: Change) -> Tensor:
        x = x.clone()
        x[..., self.columns] = change(x[..., self.columns])
        return x


def site(trace: Trace, layer: int, part: Part, head: int | None = None, stack: str | None = None) -> Site:
    name, layer = trace.place(layer, stack)
    block = f"{name}.layers.{layer}"
    if part not in get_args(Part):
        raise unknown_name("part", part, get_args(Part))
    if head is not None:
        if part != "attention":
            raise ClearheadError(f"heads are parts of attention, not of {part}; leave out one of them")
        config = trace.described(layer, name).attention
        width = config.value_width or cast(GroupedAttention, config).head_width
        first = index("head", head, trace.num_heads(layer, name)) * width
        return Site(f"{block}.attention.output", at_input=True, columns=slice(first, first + width))
    if part in ("stream", "layer"):
        return Site(block, at_input=part == "stream", columns=slice(None))
    return Site(f"{block}.{part}", at_input=False, columns=slice(None))


def changed(network: Transformer, place: Site, change: Change) -> Transformer:
    """The network with another value at the place, which `change` gives for the one there.

    Only the modules on the way there are copied. The network itself, all the weights and whoever runs them stay as
    they are; a copy is not compiled, so it heeds its hook.
    """
    twin = at = own(network)
    for name in place.path.split("."):
        at._modules[name] = own(cast(nn.Module, at._modules[name]))
        at = cast(nn.Module, at._modules[name])

    def at_input(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return place.change(given[0], change), *given[1:]

    def at_output(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        return place.change(out, change)

    if place.at_input:
        at.register_forward_pre_hook(at_input)
    else:
        at.register_forward_hook(at_output)
    return cast(Transformer, twin)


def own(module: nn.Module) -> nn.Module:
    """A copy with the same weights, without dropout, whose parts can be exchanged and whose hooks are its own."""
    twin = copy(module)
    twin.training = False
    vars(twin).pop("forward", None)  # put there to recompute it in training, which runs the module, not the copy
    twin._modules = dict(module._modules)
    twin._forward_hooks = OrderedDict(module._forward_hooks)
    twin._forward_pre_hooks = OrderedDict(module._forward_pre_hooks)
    return twin
