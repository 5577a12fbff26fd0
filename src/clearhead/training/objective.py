"""A batch to its loss: run the network, look at the tokens asked for, sum.

    objective = build_objective(network, config); losses = objective(batch); (losses.total / num_targets).backward()

One module holds all that one forward touches, so that it can be compiled, cast or wrapped for several ranks as one.

Half precision is explicit: weights stay in float32 and a bfloat16 copy of them is made inside each forward, so that
activations, the residual stream too, are bfloat16 and gradients come back in float32. (autocast leaves the residual
stream in float32: a third more memory on GPT-2.) Norms, softmax, routers and the loss compute in float32 anyway.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from clearhead.data import IGNORED, Batch
from clearhead.model import Block, LogitHead, RecurrentTranslator, Scoring, Transformer, fused_attention
from clearhead.training.balance import BalanceLoss, Routing
from clearhead.training.config import TrainConfig
from clearhead.training.head_loss import head_loss, suits
from clearhead.training.loss import Losses, chunked_cross_entropy, cross_entropy

Network = Transformer | RecurrentTranslator

LONGEST_IN_PRODUCTS = 512  # tokens, up to which the weights of a head take less memory than its other activations


class Objective(nn.Module):
    def __init__(self, network: Network, config: TrainConfig, routing: Routing | None = None):
        super().__init__()
        self.network, self.config, self.routing = network, config, routing
        self.fuses_head = suits(network)

    def forward(self, batch: Batch) -> Losses:
        """Sums over the batch's targets; in training a balance loss weighs as many tokens as the batch asks for."""
        config, network = self.config, self.network
        losses = self.losses(hidden_states(network, batch), batch.targets)
        if not self.training or self.routing is None:
            return losses
        if not isinstance(config.balance, BalanceLoss):
            self.routing.count(batch.real, batch.source_mask)
            return losses
        penalty = config.balance.weight * self.routing.loss(batch.real, batch.source_mask)
        return losses._replace(total=losses.total + penalty * (batch.targets != IGNORED).sum())

    def losses(self, hidden: Tensor, targets: Tensor) -> Losses:
        network, chunk = self.network, self.config.chunk_tokens
        extra = (self.config.smoothing, self.config.z_weight) if self.training else (0.0, 0.0)
        if self.fuses_head:
            head = cast(LogitHead, network.head)
            matrix = head.matrix(cast(Transformer, network).output_table)
            return head_loss(head.features(hidden), matrix, head.bias, targets, *extra, chunk)
        if chunk is None:
            return cross_entropy(network.to_logits(hidden), targets, *extra)
        to_logits = with_weights_of_now(network, network.to_logits)
        return chunked_cross_entropy(hidden, targets, to_logits, chunk, *extra)


def hidden_states(network: Network, batch: Batch) -> Tensor:
    """What the head reads (B, T, D)."""
    kernel = on_processor if batch.tokens.device.type == "cpu" else fused_attention
    if batch.source is None:
        assert isinstance(network, Transformer)
        return network.hidden_states(
            batch.tokens, batch.mask, batch.positions, documents=batch.documents, kernel=kernel
        )
    if isinstance(network, RecurrentTranslator):
        return network.hidden_states(batch.tokens, network.encode(batch.source, batch.source_mask), batch.mask)[:, 1:]
    encoder_output = network.encode(batch.source, batch.source_mask, kernel=kernel)
    return network.hidden_states(batch.tokens, batch.mask, encoder_output=encoder_output, kernel=kernel)


def on_processor(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
    """Where PyTorch's kernel goes backward five times as slowly in bfloat16 as in float32 (2.13, AVX-512).

    Causal rows of moderate length in bfloat16 are two products and a softmax; all else is the kernel in float32.
    """
    only_causal = how.mask.causal and how.bias is None and how.softcap is None and how.temperature is None
    if q.dtype == torch.bfloat16 and only_causal and q.shape == k.shape and q.shape[-2] <= LONGEST_IN_PRODUCTS:
        hidden = q.new_full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1)
        weights = ((q * how.scale) @ k.transpose(-2, -1) + hidden).softmax(dim=-1)
        return dropout(weights, how.dropout) @ v
    precise = torch.promote_types(q.dtype, torch.float32)
    return fused_attention(q.to(precise), k.to(precise), v.to(precise), how).to(q.dtype)


def faster_precision(device: torch.device) -> Literal["float32", "bfloat16"]:
    """What `auto` is on this device: bfloat16 where its products are the faster ones. AMX comes with AVX-512 BF16."""
    if device.type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        faster = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if faster else "float32"


class InBfloat16(nn.Module):
    """The same module computed with bfloat16 copies of its float32 weights; routers stay precise, near ties decide."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        weights = self.module.named_parameters()
        half = {name: weight if ".router." in name else weight.bfloat16() for name, weight in weights}
        # Not tied: weights are shared by sharing a module, which is then found in all its places.
        return functional_call(self.module, half, inputs, tie_weights=False)


@contextmanager
def holding(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """These tensors in the place of the module's parameters of these names."""
    owners = {name: module.get_submodule(name.rpartition(".")[0])._parameters for name in weights}
    leaves = {name: name.rpartition(".")[2] for name in weights}
    before = {name: owners[name][leaves[name]] for name in weights}
    try:
        for name, weight in weights.items():
            owners[name][leaves[name]] = weight  # type: ignore[assignment]  # a copy is no Parameter
        yield
    finally:
        for name, parameter in before.items():
            owners[name][leaves[name]] = parameter


def with_weights_of_now(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a forward that runs again later, when a cast copy no longer stands in the module."""
    if torch.compiler.is_compiling():  # which sees to it
        return function
    held = dict(module.named_parameters(remove_duplicate=False))

    def run(*inputs: Any, **options: Any) -> Any:
        with holding(module, held):
            return function(*inputs, **options)

    return run


def build_objective(
    network: Network, config: TrainConfig, routing: Routing | None = None, cast: bool = True
) -> nn.Module:
    """`cast` False: whoever wraps it sees to half precision."""
    if config.checkpoint_activations:
        recompute_blocks(network)
    objective: nn.Module = Objective(network, config, routing)
    if config.precision == "bfloat16" and cast:
        objective = InBfloat16(objective)
    if config.compile:
        objective.compile()
    return objective


def recompute_blocks(network: nn.Module) -> None:
    """Keep only the input of each block, and run it again when it goes backward (Chen et al. 2016)."""
    for block in network.modules():
        if isinstance(block, Block):
            block.forward = partial(recomputed, block, block.forward)  # type: ignore[method-assign]


def recomputed(block: Block, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return checkpoint(with_weights_of_now(block, forward), *inputs, use_reentrant=False, **options)
