"""Change a value inside a network while it runs, on a copy that shares the weights.

logits = trace.rerun(-1, with_intervention(network, find_site(trace, layer=3, part="attention"), torch.zeros_like))

residual       the input of a block                              (1, T, D)
attention      the output of attention                           (1, T, D)
head           the output of one head, before output projection  (1, T, H)
feed_forward   the output of feed-forward                        (1, T, D)
layer          the output of a block                             (1, T, D)
"""

from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from clearhead.architecture import GroupedAttention
from clearhead.errors import ClearheadError, unknown_name
from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.trace import Trace
from clearhead.model import Transformer

Part = Literal["residual", "attention", "feed_forward", "layer"]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Site:
    """The input or output of a module, or some columns of it."""

    path: str  # of a module in the network, such as decoder.layers.3.attention
    at_input: bool
    columns: slice  # of the last dimension

    def apply(self, x: Tensor, change: Change) -> Tensor:
        """Return a copy of x with the columns of this site changed."""
        x = x.clone()
        x[..., self.columns] = change(x[..., self.columns])
        return x


def find_site(trace: Trace, layer: int, part: Part, head: int | None = None, stack: str | None = None) -> Site:
    """Return the site of a part of a layer, or of one attention head of it."""
    name, layer = trace.resolve_layer(layer, stack)
    block = f"{name}.layers.{layer}"
    if part not in get_args(Part):
        raise unknown_name("part", part, get_args(Part))
    if head is not None:
        if part != "attention":
            raise ClearheadError(f"heads are parts of attention, not of {part}; leave out head or part")
        config = trace.layer_config(layer, name).attention
        width = config.value_width or cast(GroupedAttention, config).head_width
        first = check_index("head", head, trace.num_heads(layer, name)) * width
        return Site(f"{block}.attention.output", at_input=True, columns=slice(first, first + width))
    if part in ("residual", "layer"):
        return Site(block, at_input=part == "residual", columns=slice(None))
    return Site(f"{block}.{part}", at_input=False, columns=slice(None))


def with_intervention(network: Transformer, site: Site, change: Change) -> Transformer:
    """Return a copy of the network in which `change` is applied to the value at the site.

    Only the modules on the path to the site are copied. The network itself, its weights and other threads that run it
    are unaffected. The copy is not compiled, so its hook runs.
    """
    changed = module = copy_module(network)
    for name in site.path.split("."):
        module._modules[name] = copy_module(cast(nn.Module, module._modules[name]))
        module = cast(nn.Module, module._modules[name])

    def change_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return site.apply(inputs[0], change), *inputs[1:]

    def change_output(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return site.apply(output, change)

    if site.at_input:
        module.register_forward_pre_hook(change_input)
    else:
        module.register_forward_hook(change_output)
    return cast(Transformer, changed)


def copy_module(module: nn.Module) -> nn.Module:
    """Return a copy that shares weights and submodules, runs without dropout and has its own hooks."""
    copied = copy(module)
    copied.training = False
    vars(copied).pop("forward", None)  # set by training for recomputation; it would run the original module
    copied._modules = dict(module._modules)
    copied._forward_hooks = OrderedDict(module._forward_hooks)
    copied._forward_pre_hooks = OrderedDict(module._forward_pre_hooks)
    return copied
