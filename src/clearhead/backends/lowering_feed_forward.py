"""Lower the feed-forward branch of a block: dense, or a mixture of experts.

lowered = lower_feed_forward(block.feed_forward, block.layer.feed_forward)
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.architecture import Activation, Experts, FeedForward, GateClamp
from clearhead.backends.lowering_projections import Projection, merge_projections
from clearhead.backends.modules import PackedMatrix
from clearhead.model import FeedForwardLayer, MixtureLayer, Xielu


@dataclass(frozen=True)
class LoweredActivation:
    """The activation of a feed-forward branch, with its parameters if it has any."""

    name: Activation
    clamp: GateClamp | None = None
    xielu: Xielu | None = None


@dataclass(frozen=True)
class LoweredFeedForward:
    """A dense feed-forward layer."""

    gated: bool
    activation: LoweredActivation
    gate_and_up: Projection  # rows of the gate, if there is one, and of the up projection
    down: Projection


@dataclass(frozen=True)
class LoweredMixture:
    """A mixture of experts: its router, and the matrices of each expert. How experts are chosen is in the config."""

    config: Experts
    router: Projection  # (E, D) in float32, since rounding could change a choice between close scores
    selection_bias: Tensor | None  # (E,)
    activation: LoweredActivation
    gate: tuple[Projection, ...]  # one for each expert (F, D); empty without gates
    up: tuple[Projection, ...]
    down: tuple[Projection, ...]  # (D, F)
    shared: LoweredFeedForward | None
    shared_gate: Projection | None  # (1, D)


def lower_feed_forward(module: nn.Module, config: FeedForward | Experts) -> LoweredFeedForward | LoweredMixture:
    """Collect the weights and settings of a feed-forward branch; merge the gate and up matrices of a dense one."""
    if isinstance(config, Experts):
        assert isinstance(module, MixtureLayer)
        return _lower_mixture(module, config)
    assert isinstance(module, FeedForwardLayer)
    return _lower_dense(module, config)


def _lower_dense(module: FeedForwardLayer, config: FeedForward) -> LoweredFeedForward:
    activation = module.activation if isinstance(module.activation, Xielu) else None
    gate_and_up = (module.up,) if module.gate is None else (module.gate, module.up)
    return LoweredFeedForward(
        module.gate is not None,
        LoweredActivation(config.activation, config.clamp, activation),
        merge_projections(*gate_and_up),
        merge_projections(module.down),
    )


def _lower_mixture(module: MixtureLayer, config: Experts) -> LoweredMixture:
    router, shared = module.router, None
    if module.shared is not None and config.shared is not None:
        shared = _lower_dense(module.shared, config.shared)
    return LoweredMixture(
        config,
        Projection(_in_float32(router.weight), None if router.bias is None else _in_float32(router.bias)),
        None if router.selection_bias is None else _in_float32(router.selection_bias),
        LoweredActivation(config.expert.activation, config.expert.clamp),
        () if module.gate is None else _expert_projections(module.gate, module.gate_bias, config.num_experts),
        _expert_projections(module.up, module.up_bias, config.num_experts),
        _expert_projections(module.down, module.down_bias, config.num_experts),
        shared,
        None if module.shared_gate is None else merge_projections(module.shared_gate),
    )


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32).contiguous()


def _expert_projections(
    weights: Tensor | PackedMatrix, biases: Tensor | None, num_experts: int
) -> tuple[Projection, ...]:
    """Return the matrix and bias of each expert, which share memory with the modules."""
    rows = [None] * num_experts if biases is None else list(biases.detach())
    if isinstance(weights, Tensor):
        return tuple(Projection(weight.contiguous(), bias) for weight, bias in zip(weights.detach(), rows, strict=True))
    packed = weights.packed
    size = packed.shape[0] // num_experts
    return tuple(
        Projection(packed.rows(slice(expert * size, (expert + 1) * size)), bias) for expert, bias in enumerate(rows)
    )
