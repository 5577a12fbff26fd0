"""One block computed by several processes: each has some of the heads and some of the feed-forward's columns.

    divided = divide(network, Part(0, 2, add))       # the weights that are now slices, and along which axis

    x ─ spread ─ query, key, value of my heads ─ attend ─ my columns of output ─ total ─ + bias ─ x
    x ─ spread ─ my rows of gate and up ─────────────────── my columns of down ─── total ─ + bias ─ x

`spread` is the identity whose gradient is summed, `total` the sum whose gradient is the identity (Shoeybi et al. 2019,
§3, figure 3; f and g there). Embeddings, norms and head are whole in every process and compute the same everywhere,
dropout too if all processes draw alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Alibi, RelativeBuckets, RelativeSinusoid
from clearhead.errors import ClearheadError
from clearhead.model import Attention, Block, FeedForwardLayer

Add = Callable[[Tensor], Tensor]  # in place, over all processes


@dataclass(frozen=True)
class Part:
    """Which of how many, and how they sum."""

    number: int
    count: int
    add: Add


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, add: Add) -> Tensor:
        context.add = add
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.add(gradient.clone(memory_format=torch.contiguous_format)), None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, add: Add) -> Tensor:
        return add(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


spread: Callable[[Tensor, Add], Tensor] = Spread.apply
total: Callable[[Tensor, Add], Tensor] = Total.apply


class SummedLinear(nn.Module):
    """A linear layer of which each process has some columns; the bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, add: Add):
        super().__init__()
        self.weight, self.bias, self.add = linear.weight, linear.bias, add

    def forward(self, x: Tensor) -> Tensor:
        out = total(functional.linear(x, self.weight), self.add)
        return out if self.bias is None else out + self.bias


def divide(network: nn.Module, part: Part) -> dict[Tensor, int]:
    """Leave each block only this part of its weights; which weights these are, and the axis they are cut along."""
    divided: dict[Tensor, int] = {}
    for block in (module for module in network.modules() if isinstance(module, Block)):
        attentions = [block.attention, getattr(block, "cross_attention", None)]
        for attention in filter(None, attentions):
            divided |= divide_attention(attention, part)
        divided |= divide_feed_forward(block.feed_forward, part)
    if not divided:
        raise ClearheadError("tensor parallel training cannot divide a recurrent network; use the strategy 'ddp'")
    return divided


def divide_attention(attention: nn.Module, part: Part) -> dict[Tensor, int]:
    if not isinstance(attention, Attention):
        raise ClearheadError("tensor parallel training cannot divide latent attention; use the strategy 'fsdp'")
    config = attention.config
    if isinstance(config.position, Alibi | RelativeBuckets | RelativeSinusoid):
        kind = type(config.position).__name__
        raise ClearheadError(f"tensor parallel training cannot divide heads with {kind}; use the strategy 'fsdp'")
    if config.num_kv_heads % part.count:
        raise ClearheadError(
            f"{config.num_kv_heads} key-value heads do not divide among {part.count} processes; "
            "start as many as divide them, or use the strategy 'fsdp'"
        )
    heads, kv_heads = config.num_heads // part.count, config.num_kv_heads // part.count
    attention.config = replace(config, num_heads=heads, num_kv_heads=kv_heads)
    attention.register_forward_pre_hook(spreading(part.add), with_kwargs=True)
    for norm in (attention.query_norm, attention.key_norm):  # whole, but each process sees only its own heads
        for weight in norm.parameters():
            weight.register_hook(lambda gradient: part.add(gradient.clone()))
    divided = rows_of(part, attention.query, attention.key, attention.value) | columns_of(part, attention.output)
    attention.output = SummedLinear(attention.output, part.add)  # type: ignore[assignment]
    return divided


def divide_feed_forward(layer: nn.Module, part: Part) -> dict[Tensor, int]:
    if not isinstance(layer, FeedForwardLayer):
        raise ClearheadError("tensor parallel training cannot divide a mixture of experts; use the strategy 'fsdp'")
    if layer.up.out_features % part.count:
        raise ClearheadError(
            f"a feed-forward of width {layer.up.out_features} does not divide among {part.count} processes"
        )
    layer.register_forward_pre_hook(spreading(part.add), with_kwargs=True)
    inward = [layer.up] if layer.gate is None else [layer.gate, layer.up]
    divided = rows_of(part, *inward) | columns_of(part, layer.down)
    layer.down = SummedLinear(layer.down, part.add)  # type: ignore[assignment]
    return divided


def spreading(add: Add) -> Callable[..., Any]:
    """A hook before forward: x, and the memory of cross-attention, reach every process."""

    def before(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        def of(value: Any) -> Any:
            return spread(value, add) if isinstance(value, Tensor) else value

        return tuple(map(of, inputs)), {name: of(value) for name, value in options.items()}

    return before


def rows_of(part: Part, *linears: nn.Linear) -> dict[Tensor, int]:
    divided: dict[Tensor, int] = {}
    for linear in linears:
        linear.weight = slice_of(linear.weight, 0, part)
        divided[linear.weight] = 0
        if linear.bias is not None:
            linear.bias = slice_of(linear.bias, 0, part)
            divided[linear.bias] = 0
    return divided


def columns_of(part: Part, linear: nn.Linear) -> dict[Tensor, int]:
    linear.weight = slice_of(linear.weight, 1, part)
    return {linear.weight: 1}


def slice_of(weight: Tensor, axis: int, part: Part) -> nn.Parameter:
    piece = weight.detach().chunk(part.count, dim=axis)[part.number]
    return nn.Parameter(piece.clone(memory_format=torch.contiguous_format), requires_grad=weight.requires_grad)
