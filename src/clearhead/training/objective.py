"""Compute the loss of a batch.

    objective = build_objective(network, config); losses = objective(batch); (losses.total / num_targets).backward()

One module contains the whole forward pass, so that it can be compiled, cast or wrapped for several processes as one.

In half precision, weights stay in float32 and each forward pass makes a bfloat16 copy of them. Activations, including
the residual stream, are bfloat16, and gradients are float32. (autocast keeps the residual stream in float32: a third
more memory on GPT-2.) Norms, softmax, routers and the loss always compute in float32.
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
from clearhead.training.balance import BalanceLoss, RoutingMonitor
from clearhead.training.config import TrainConfig
from clearhead.training.head_loss import can_fuse_head, fused_head_loss
from clearhead.training.loss import Losses, chunked_cross_entropy, cross_entropy

Network = Transformer | RecurrentTranslator

MAX_MATMUL_LENGTH = 512  # tokens, up to which the attention weights take less memory than the other activations


class Objective(nn.Module):
    """A network and the loss of its predictions."""

    def __init__(self, network: Network, config: TrainConfig, routing: RoutingMonitor | None = None):
        super().__init__()
        self.network = network
        self.config = config
        self.routing = routing
        self.fuses_head = can_fuse_head(network)

    def forward(self, batch: Batch) -> Losses:
        """Return the losses, summed over the targets of a batch.

        In training, the balance loss is multiplied by the number of targets, so that it is a sum too.
        """
        losses = self.compute_losses(hidden_states(self.network, batch), batch.targets)
        if not self.training or self.routing is None:
            return losses
        balance = self.config.balance
        if not isinstance(balance, BalanceLoss):
            self.routing.count_loads(batch.real_tokens, batch.source_mask)
            return losses
        penalty = balance.weight * self.routing.loss(batch.real_tokens, batch.source_mask)
        return losses._replace(total=losses.total + penalty * (batch.targets != IGNORED).sum())

    def compute_losses(self, hidden: Tensor, targets: Tensor) -> Losses:
        """Return the losses of hidden states (B, T, D). Smoothing and z-loss apply in training only."""
        network = self.network
        chunk_tokens = self.config.chunk_tokens
        weights = (self.config.smoothing, self.config.z_weight) if self.training else (0.0, 0.0)
        if self.fuses_head:
            head = cast(LogitHead, network.head)
            matrix = head.output_matrix(cast(Transformer, network).token_table)
            return fused_head_loss(head.features(hidden), matrix, head.bias, targets, *weights, chunk_tokens)
        if chunk_tokens is None:
            return cross_entropy(network.compute_logits(hidden), targets, *weights)
        compute_logits = bind_current_weights(network, network.compute_logits)
        return chunked_cross_entropy(hidden, targets, compute_logits, chunk_tokens, *weights)


def hidden_states(network: Network, batch: Batch) -> Tensor:
    """Return the hidden states (B, T, D) that the head reads."""
    kernel = cpu_training_attention if batch.tokens.device.type == "cpu" else fused_attention
    if batch.source is None:
        assert isinstance(network, Transformer)
        return network.hidden_states(
            batch.tokens, batch.mask, batch.positions, documents=batch.documents, kernel=kernel
        )
    if isinstance(network, RecurrentTranslator):
        return network.hidden_states(batch.tokens, network.encode(batch.source, batch.source_mask), batch.mask)[:, 1:]
    encoder_output = network.encode(batch.source, batch.source_mask, kernel=kernel)
    return network.hidden_states(batch.tokens, batch.mask, encoder_output=encoder_output, kernel=kernel)


def cpu_training_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Compute attention for training on a CPU.

    In bfloat16, causal attention of moderate length is two matrix products and a softmax; everything else uses
    PyTorch's kernel in float32. The backward pass of that kernel is five times slower in bfloat16 than in float32
    (PyTorch 2.13, AVX-512).
    """
    has_extras = any(extra is not None for extra in (scoring.bias, scoring.softcap, scoring.temperature, scoring.sinks))
    only_causal = scoring.mask.causal and not has_extras
    if q.dtype == torch.bfloat16 and only_causal and q.shape == k.shape and q.shape[-2] <= MAX_MATMUL_LENGTH:
        mask = q.new_full((q.shape[-2], k.shape[-2]), -torch.inf).triu(1)
        weights = ((q * scoring.scale) @ k.transpose(-2, -1) + mask).softmax(dim=-1)
        return dropout(weights, scoring.dropout) @ v
    precise = torch.promote_types(q.dtype, torch.float32)
    return fused_attention(q.to(precise), k.to(precise), v.to(precise), scoring).to(q.dtype)


def faster_precision(device: torch.device) -> Literal["float32", "bfloat16"]:
    """Return the precision for `auto`: bfloat16 if the device multiplies faster in it. AMX implies AVX-512 BF16."""
    if device.type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        faster = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if faster else "float32"


class Bfloat16Module(nn.Module):
    """Runs a module with bfloat16 copies of its float32 weights.

    Routers stay in float32, because rounding could change their choice between close scores.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        """Return the output of the module, computed with bfloat16 copies of its weights."""
        weights = self.module.named_parameters()
        copies = {name: weight if ".router." in name else weight.bfloat16() for name, weight in weights}
        # Tied weights need no handling: the modules that share a weight are one module under several names.
        return functional_call(self.module, copies, inputs, tie_weights=False)


@contextmanager
def _swapped_parameters(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the parameters of these names by tensors, for the duration of a `with` block."""
    owners = {name: module.get_submodule(name.rpartition(".")[0])._parameters for name in weights}
    last_names = {name: name.rpartition(".")[2] for name in weights}
    original = {name: owners[name][last_names[name]] for name in weights}
    try:
        for name, weight in weights.items():
            owners[name][last_names[name]] = weight  # type: ignore[assignment]  # a copy is not a Parameter
        yield
    finally:
        for name, parameter in original.items():
            owners[name][last_names[name]] = parameter


def bind_current_weights(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` bound to the weights that the module has now, whenever it is called later.

    Recomputation in the backward pass then uses the same bfloat16 copies as the forward pass.
    """
    if torch.compiler.is_compiling():  # the compiler handles recomputation itself
        return function
    weights = dict(module.named_parameters(remove_duplicate=False))

    def run(*inputs: Any, **options: Any) -> Any:
        with _swapped_parameters(module, weights):
            return function(*inputs, **options)

    return run


def build_objective(
    network: Network,
    config: TrainConfig,
    routing: RoutingMonitor | None = None,
    to_bfloat16: bool = True,
    objective: nn.Module | None = None,
) -> nn.Module:
    """Return the objective of a network, by default the cross-entropy of its predictions.

    With `to_bfloat16` False, the caller casts it to half precision (FSDP).
    """
    if config.checkpoint_activations:
        recompute_blocks(network)
    objective = Objective(network, config, routing) if objective is None else objective
    if config.precision == "bfloat16" and to_bfloat16:
        objective = Bfloat16Module(objective)
    if config.compile:
        objective.compile()
    return objective


def recompute_blocks(network: nn.Module) -> None:
    """Store only the input of each block, and recompute the block in the backward pass (Chen et al. 2016)."""
    for block in network.modules():
        if isinstance(block, Block):
            block.forward = partial(_run_with_recomputation, block, block.forward)  # type: ignore[method-assign]


def _run_with_recomputation(block: Block, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    return checkpoint(bind_current_weights(block, forward), *inputs, use_reentrant=False, **options)
