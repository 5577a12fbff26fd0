"""Build the optimizers: AdamW for all weights, or Muon for the hidden matrices and AdamW for the rest.

    optimizers = build_optimizers(network, Muon()); set_learning_rates(optimizers, factor=0.5)

Weight decay applies to matrices only, not to norms, biases and embeddings.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from clearhead.config import CheckedConfig
from clearhead.errors import require


@dataclass(frozen=True, kw_only=True)
class AdamW(CheckedConfig):
    """AdamW (Loshchilov & Hutter 2019)."""

    MAY_BE_ZERO = ("weight_decay",)

    learning_rate: float = 1e-3  # the highest; the schedule scales it
    beta1: float = 0.9  # decay of the mean of the gradients
    beta2: float = 0.95  # decay of the mean of their squares
    epsilon: float = 1e-8  # added to the square root of that mean
    weight_decay: float = 0.1  # share of a matrix that is subtracted at each step, times the learning rate

    def __post_init__(self) -> None:
        super().__post_init__()
        require(max(self.beta1, self.beta2) < 1, f"AdamW's betas are {self.beta1}, {self.beta2}; they must be below 1")


@dataclass(frozen=True, kw_only=True)
class Muon(CheckedConfig):
    """Muon: orthogonalize the momentum with Newton-Schulz iterations (Jordan et al. 2024).

    Updates are scaled by 0.2 · √max(rows, columns), which gives them the size of AdamW's (Liu et al. 2025, §2.2), so
    that a learning rate for AdamW suits Muon too.
    """

    MAY_BE_ZERO = ("weight_decay",)

    learning_rate: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    rest: AdamW = field(default_factory=AdamW)  # optimizer of embeddings, head, norms, biases and stacked experts

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.momentum < 1, f"Muon's momentum is {self.momentum}; it must be below 1")


def build_optimizers(network: nn.Module, config: AdamW | Muon) -> list[Optimizer]:
    """Return the optimizers of all weights that are not frozen."""
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    for_muon, decayed, not_decayed = [], [], []
    for name, parameter in trained:
        if parameter.ndim < 2 or id(parameter) in embeddings or name.endswith("_bias"):
            not_decayed.append(parameter)
        elif isinstance(config, Muon) and parameter.ndim == 2 and name != "head.weight":
            for_muon.append(parameter)
        else:
            decayed.append(parameter)
    optimizers: list[Optimizer] = []
    if decayed or not_decayed:
        optimizers.append(_build_adamw(decayed, not_decayed, config.rest if isinstance(config, Muon) else config))
    if isinstance(config, Muon) and for_muon:
        optimizers.append(
            torch.optim.Muon(
                for_muon,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["base_lr"] = group["lr"]
    return optimizers


def _build_adamw(decayed: list[nn.Parameter], not_decayed: list[nn.Parameter], config: AdamW) -> Optimizer:
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def set_learning_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Set the learning rate of every parameter group to its configured rate times a factor."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["base_lr"] * factor
