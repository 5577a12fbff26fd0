"""Which rule moves which weights: AdamW for all, or Muon for the hidden matrices and AdamW for the rest.

    optimizers = build_optimizers(network, Muon()); set_rates(optimizers, factor=0.5)

Weight decay pulls at matrices only: norms, biases and embeddings are left alone.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from clearhead.config import Checked
from clearhead.errors import require


@dataclass(frozen=True, kw_only=True)
class AdamW(Checked):
    """Loshchilov & Hutter 2019."""

    MAY_BE_ZERO = ("weight_decay",)

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(max(self.beta1, self.beta2) < 1, f"AdamW's betas are {self.beta1}, {self.beta2}; they must be below 1")


@dataclass(frozen=True, kw_only=True)
class Muon(Checked):
    """Momentum made orthogonal by Newton-Schulz steps (Jordan et al. 2024), scaled so that an AdamW rate serves.

    The scale is 0.2 · √max(rows, columns), which gives updates the size of AdamW's (Liu et al. 2025, §2.2).
    """

    MAY_BE_ZERO = ("weight_decay",)

    learning_rate: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    rest: AdamW = field(default_factory=AdamW)  # embeddings, head, norms, biases, stacked experts

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.momentum < 1, f"Muon's momentum is {self.momentum}; it must be below 1")


def build_optimizers(network: nn.Module, config: AdamW | Muon) -> list[Optimizer]:
    embeddings = {id(part.weight) for part in network.modules() if isinstance(part, nn.Embedding)}
    trained = [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
    hidden, decayed, kept = [], [], []
    for name, parameter in trained:
        if parameter.ndim < 2 or id(parameter) in embeddings or name.endswith("_bias"):
            kept.append(parameter)
        elif isinstance(config, Muon) and parameter.ndim == 2 and name != "head.weight":
            hidden.append(parameter)
        else:
            decayed.append(parameter)
    adam = config.rest if isinstance(config, Muon) else config
    optimizers: list[Optimizer] = []
    if decayed or kept:
        optimizers.append(build_adam(decayed, kept, adam))
    if isinstance(config, Muon) and hidden:
        optimizers.append(
            torch.optim.Muon(
                hidden,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["full_rate"] = group["lr"]
    return optimizers


def build_adam(decayed: list[nn.Parameter], kept: list[nn.Parameter], config: AdamW) -> Optimizer:
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def set_rates(optimizers: list[Optimizer], factor: float) -> None:
    """Every group's full rate times the schedule's factor."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["full_rate"] * factor
