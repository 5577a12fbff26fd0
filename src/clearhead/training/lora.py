"""Fine-tune by low-rank adaptation: y = W x + (α / r) · B A x with W frozen (Hu et al. 2021, §4.1).

    add_lora(network, Lora(rank=8)); ...; merge_lora(network)   # an ordinary network again

A is random and B starts at 0, so that training starts from the unchanged model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.config import CheckedConfig
from clearhead.errors import require, unknown_name


@dataclass(frozen=True, kw_only=True)
class Lora(CheckedConfig):
    """The [lora] table of a recipe."""

    rank: int = 8  # rank of the adapters: the number of rows of A and of columns of B
    alpha: float = 16.0  # B A x is scaled by alpha / rank, so that a learning rate found for one rank suits another
    dropout: float | None = None  # dropout of the input of A
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")  # the linear layers to adapt

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dropout is None or self.dropout < 1.0, f"Lora.dropout is {self.dropout}; it must be below 1")


class LoraLinear(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear, config: Lora):
        super().__init__()
        self.base, self.scale, self.is_enabled = base, config.alpha / config.rank, True
        self.dropout = nn.Dropout(config.dropout or 0.0)
        self.reduce = nn.Parameter(base.weight.new_empty(config.rank, base.in_features))  # A (R, in)
        self.expand = nn.Parameter(base.weight.new_zeros(base.out_features, config.rank))  # B (out, R)
        nn.init.kaiming_uniform_(self.reduce, a=math.sqrt(5))  # the initialization of torch.nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + scale · B A dropout(x): (..., in) -> (..., out)."""
        if not self.is_enabled:
            return self.base(x)
        reduced = nn.functional.linear(self.dropout(x), self.reduce)  # (..., R)
        return self.base(x) + self.scale * nn.functional.linear(reduced, self.expand)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """Add the adapter to the weight of the base layer, and return that layer."""
        self.base.weight += self.scale * (self.expand @ self.reduce)
        return self.base


def add_lora(network: nn.Module, config: Lora) -> None:
    """Freeze the network and add an adapter to each linear layer whose name ends in a target."""
    network.requires_grad_(False)
    linears = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    last_names = {name: name.rpartition(".")[2] for name in linears}
    chosen = [name for name in linears if last_names[name] in config.targets]
    # A model need not have all of the default targets.
    unknown = [target for target in config.targets if target not in {*last_names.values(), *Lora.targets}]
    if unknown or not chosen:
        targets = " or ".join(unknown or config.targets)
        raise unknown_name("linear layer of this model:", targets, {*last_names.values()})
    for name in chosen:
        network.set_submodule(name, LoraLinear(linears[name], config))


def lora_matrices(network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each adapter by the name of its linear layer."""
    adapters = ((name, module) for name, module in network.named_modules() if isinstance(module, LoraLinear))
    return {name: (module.reduce, module.expand) for name, module in adapters}


@contextmanager
def disable_lora(network: nn.Module) -> Iterator[None]:
    """Compute without the adapters for the duration of a `with` block."""
    adapted = [module for module in network.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.is_enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.is_enabled = True


def merge_lora(network: nn.Module) -> None:
    """Merge all adapters into the weights, and unfreeze the network."""
    for name, module in list(network.named_modules()):
        if isinstance(module, LoraLinear):
            network.set_submodule(name, module.merge())
    network.requires_grad_(True)
