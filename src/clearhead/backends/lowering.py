"""What the fast steps can do, and the merging of matrices that are read together.

reason = unknown_in(stack); weight = merge((attention.query, attention.key, attention.value))
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.architecture import (
    DeviationNorm,
    DynamicScaling,
    FeedForward,
    GroupedAttention,
    HeadNorm,
    Layer,
    NoPosition,
    Rope,
    Stack,
)
from clearhead.backends.packed.formats import Packed
from clearhead.backends.packed.modules import PackedLinear
from clearhead.model import Attention, Block, FeedForwardLayer, Residual, RootMeanSquare

PLACEMENTS = {"pre": 0, "post": 1, "sandwich": 2}
# Exactly these: a subclass, or what stands in a module's place to listen or to add, does more than the kernels know.
KNOWN_MODULES = {
    *(nn.ModuleList, Block, Residual, Attention, FeedForwardLayer, nn.Linear, PackedLinear),
    *(RootMeanSquare, nn.LayerNorm, nn.Identity, nn.Dropout),
}
ACTIVATIONS = {"identity": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def unknown_in(stack: Stack) -> str | None:
    """What the fast steps do not know of these layers, in a few words."""
    if isinstance(stack.final_norm, DeviationNorm):
        return "norms by the standard deviation"
    return next((reason for layer in stack.layers if (reason := unknown_part(layer))), None)


def unknown_part(layer: Layer) -> str | None:
    if layer.placement not in PLACEMENTS:
        return f"{layer.placement} placement"
    if isinstance(layer.norm, DeviationNorm):
        return "norms by the standard deviation"
    if not isinstance(layer.feed_forward, FeedForward) or layer.feed_forward.activation not in ACTIVATIONS:
        return "this kind of feed-forward"
    for attention in (layer.attention, layer.cross_attention):
        if attention is not None and not is_plain(attention):
            return "this kind of attention"
    return None


def is_plain(attention: Any) -> bool:
    return (
        isinstance(attention, GroupedAttention)
        and isinstance(attention.position, Rope | NoPosition)
        and not isinstance(getattr(attention.position, "scaling", None), DynamicScaling)  # no table of angles holds
        and attention.value_width in (None, attention.head_width)
        and (attention.softcap, attention.clip, attention.temperature) == (None, None, None)
        and isinstance(attention.head_norm, HeadNorm | None)
        and not isinstance(getattr(attention.head_norm, "norm", None), DeviationNorm)
    )


def are_plain(modules: list[nn.Module]) -> bool:
    """None exchanged for another, and nothing hooked into them."""
    return {type(module) for module in modules} <= KNOWN_MODULES and not any(hooks_of(modules))


def hooks_of(modules: list[nn.Module]) -> list[dict[int, Any]]:
    return [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]


def merge(modules: tuple[nn.Linear | PackedLinear, ...]) -> Tensor | Packed:
    """One matrix of all their rows; the modules then hold views of it, so that nothing is kept twice.

    Their parameters stay the same objects: an optimizer that knows them goes on to train what is used.
    """
    if len(modules) == 1:
        only = modules[0]
        return only.packed if isinstance(only, PackedLinear) else only.weight.detach().contiguous()
    packed = [module for module in modules if isinstance(module, PackedLinear)]
    if len(packed) == len(modules) and len({(m.quants.dtype, m.offsets is None) for m in packed}) == 1:
        return merge_packed(packed)
    if packed:  # in different ways: as numbers then
        return torch.cat([module.weight.detach() for module in modules])
    plain = [module for module in modules if isinstance(module, nn.Linear)]
    whole = joined([module.weight.detach() for module in plain])
    for module, part in zip(plain, whole.split([len(module.weight) for module in plain]), strict=True):
        module.weight.data = part
    return whole


def joined(parts: list[Tensor]) -> Tensor:
    """All their rows in one tensor: a copy, unless an earlier merge has left them one after the other."""
    for part, following in pairwise(parts):
        one_storage = part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
        if not one_storage or part.data_ptr() + part.nbytes != following.data_ptr() or not part.is_contiguous():
            return torch.cat(parts)
    return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())


def merge_packed(modules: list[PackedLinear]) -> Packed:
    parts = [module.packed for module in modules]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    whole = Packed(
        joined([part.quants for part in parts]),
        joined([part.scales for part in parts]),
        joined(offsets) if offsets else None,
        parts[0].columns,
    )
    start = 0
    for module, part in zip(modules, parts, strict=True):
        module.put(whole.rows(slice(start, start + part.shape[0])))
        start += part.shape[0]
    return whole
