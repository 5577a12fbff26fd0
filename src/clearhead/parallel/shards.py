"""Compute each block in several processes: every process holds some of the heads and feed-forward columns.

    axes = shard_network(network, TensorParallelRank(0, 2, all_reduce, "use strategy 'fsdp'"))

It returns the sharded weights and their axes.

    x ─ copy ─ query, key, value of own heads ─ attention ─ own columns of output ─ reduce ─ + bias ─ x
    x ─ copy ─ own rows of gate and up ──────────────────── own columns of down ─── reduce ─ + bias ─ x

`copy` is the identity whose gradient is summed over the processes; `reduce` is the sum over the processes whose
gradient is the identity (Shoeybi et al. 2019, §3, figure 3, where they are called f and g). Embeddings, norms and head
are replicated and compute the same in every process. So does dropout if all processes have the same random state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import Alibi, HeadNorm, RelativeBuckets, RelativeSinusoid
from clearhead.costs import shard_heads
from clearhead.errors import ClearheadError
from clearhead.model import Attention, Block, FeedForwardLayer

AllReduce = Callable[[Tensor], Tensor]  # sums over all processes, in place


@dataclass(frozen=True)
class TensorParallelRank:
    """The rank of this process among `size` processes, and the function that sums a tensor over all of them.

    alternative: what to do with a network that cannot be divided, for error messages.
    """

    rank: int
    size: int
    all_reduce: AllReduce
    alternative: str


class _CopyToRanks(torch.autograd.Function):
    """Identity in the forward pass; the backward pass sums the gradients of all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, all_reduce: AllReduce) -> Tensor:
        context.all_reduce = all_reduce
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromRanks(torch.autograd.Function):
    """Sum over all ranks in the forward pass; identity in the backward pass."""

    @staticmethod
    def forward(context: Any, x: Tensor, all_reduce: AllReduce) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


_copy_to_ranks: Callable[[Tensor, AllReduce], Tensor] = _CopyToRanks.apply
_reduce_from_ranks: Callable[[Tensor, AllReduce], Tensor] = _ReduceFromRanks.apply


class _InputShardedLinear(nn.Module):
    """A linear layer whose input features are divided among the processes. The bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, all_reduce: AllReduce):
        super().__init__()
        self.weight, self.bias, self.all_reduce = linear.weight, linear.bias, all_reduce

    def forward(self, x: Tensor) -> Tensor:
        out = _reduce_from_ranks(functional.linear(x, self.weight), self.all_reduce)
        return out if self.bias is None else out + self.bias


def shard_network(network: nn.Module, rank: TensorParallelRank) -> dict[Tensor, int]:
    """Keep only this process's part of each block's weights. Return the sharded weights and their axes."""
    axes: dict[Tensor, int] = {}
    for block in (module for module in network.modules() if isinstance(module, Block)):
        attentions = [block.attention, getattr(block, "cross_attention", None)]
        for attention in filter(None, attentions):
            axes |= _shard_attention(attention, rank)
        axes |= _shard_feed_forward(block.feed_forward, rank)
    if not axes:
        raise ClearheadError("tensor parallelism does not support recurrent networks; use strategy 'ddp'")
    return axes


def is_divided(network: nn.Module) -> bool:
    """Return whether other processes hold parts of a network, so that it cannot be run here alone."""
    return any(isinstance(module, _InputShardedLinear) for module in network.modules())


def _shard_attention(attention: nn.Module, rank: TensorParallelRank) -> dict[Tensor, int]:
    """Keep this process's heads."""
    if not isinstance(attention, Attention):
        raise ClearheadError(f"tensor parallelism does not support latent attention; {rank.alternative}")
    config = attention.config
    if isinstance(config.position, Alibi | RelativeBuckets | RelativeSinusoid):
        kind = type(config.position).__name__
        raise ClearheadError(f"tensor parallelism does not support heads with {kind}; {rank.alternative}")
    if isinstance(config.head_norm, HeadNorm) and config.head_norm.scope != "shared":
        raise ClearheadError(
            f"tensor parallelism does not support norms of queries and keys with scope {config.head_norm.scope!r}; "
            f"{rank.alternative}"
        )
    if config.num_kv_heads % rank.size:
        raise ClearheadError(
            f"{config.num_kv_heads} key-value heads cannot be divided among {rank.size} processes; "
            f"start a number of processes that divides them, or {rank.alternative}"
        )
    attention.config = shard_heads(config, rank.size)
    attention.register_forward_pre_hook(_copy_inputs_hook(rank.all_reduce), with_kwargs=True)
    for norm in (attention.query_norm, attention.key_norm):  # replicated, but each process sees only its own heads
        for weight in norm.parameters():
            weight.register_hook(lambda gradient: rank.all_reduce(gradient.clone()))
    axes = _shard_output_features(rank, attention.query, attention.key, attention.value)
    axes |= _shard_input_features(rank, attention.output)
    if attention.sinks is not None:
        attention.sinks = _shard_weight(attention.sinks, 0, rank)
        axes[attention.sinks] = 0
    attention.output = _InputShardedLinear(attention.output, rank.all_reduce)  # type: ignore[assignment]
    return axes


def _shard_feed_forward(layer: nn.Module, rank: TensorParallelRank) -> dict[Tensor, int]:
    """Keep this process's columns of the hidden layer."""
    if not isinstance(layer, FeedForwardLayer):
        raise ClearheadError(f"tensor parallelism does not support a mixture of experts; {rank.alternative}")
    if layer.up.out_features % rank.size:
        raise ClearheadError(
            f"a feed-forward of width {layer.up.out_features} cannot be divided among {rank.size} processes; "
            f"start a number of processes that divides it, or {rank.alternative}"
        )
    layer.register_forward_pre_hook(_copy_inputs_hook(rank.all_reduce), with_kwargs=True)
    inputs = [layer.up] if layer.gate is None else [layer.gate, layer.up]
    axes = _shard_output_features(rank, *inputs) | _shard_input_features(rank, layer.down)
    layer.down = _InputShardedLinear(layer.down, rank.all_reduce)  # type: ignore[assignment]
    return axes


def _copy_inputs_hook(all_reduce: AllReduce) -> Callable[..., Any]:
    """Return a forward pre-hook that applies `_copy_to_ranks` to x and to the encoder output of cross-attention."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        def copied(value: Any) -> Any:
            return _copy_to_ranks(value, all_reduce) if isinstance(value, Tensor) else value

        return tuple(map(copied, inputs)), {name: copied(value) for name, value in options.items()}

    return hook


def _shard_output_features(rank: TensorParallelRank, *linears: nn.Linear) -> dict[Tensor, int]:
    """Keep this process's rows of the weights and biases."""
    axes: dict[Tensor, int] = {}
    for linear in linears:
        linear.weight = _shard_weight(linear.weight, 0, rank)
        axes[linear.weight] = 0
        if linear.bias is not None:
            linear.bias = _shard_weight(linear.bias, 0, rank)
            axes[linear.bias] = 0
    return axes


def _shard_input_features(rank: TensorParallelRank, linear: nn.Linear) -> dict[Tensor, int]:
    """Keep this process's columns of the weight."""
    linear.weight = _shard_weight(linear.weight, 1, rank)
    return {linear.weight: 1}


def _shard_weight(weight: Tensor, axis: int, rank: TensorParallelRank) -> nn.Parameter:
    shard = weight.detach().chunk(rank.size, dim=axis)[rank.rank]
    return nn.Parameter(shard.clone(memory_format=torch.contiguous_format), requires_grad=weight.requires_grad)
