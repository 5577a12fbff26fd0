"""Fine-tuning by low-rank additions: y = W x + (α / r) · B A x with W frozen (Hu et al. 2021, §4.1).

    add_lora(network, Lora(rank=8)); ...; merge_lora(network)   # an ordinary network again

A is drawn, B starts at 0, so that training begins at the model as it was.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.config import Checked
from clearhead.errors import require, unknown_name


@dataclass(frozen=True, kw_only=True)
class Lora(Checked):
    rank: int = 8
    alpha: float = 16.0  # the addition is scaled by alpha / rank, so that a rate found for one rank serves another
    dropout: float | None = None  # of what the addition reads
    targets: tuple[str, ...] = ("query", "key", "value", "output", "gate", "up", "down")  # last part of a linear's name

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dropout is None or self.dropout < 1.0, f"Lora.dropout is {self.dropout}; it must be below 1")


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, config: Lora):
        super().__init__()
        self.base, self.scale = base, config.alpha / config.rank
        self.dropout = nn.Dropout(config.dropout or 0.0)
        self.reduce = nn.Parameter(base.weight.new_empty(config.rank, base.in_features))  # A (R, in)
        self.expand = nn.Parameter(base.weight.new_zeros(base.out_features, config.rank))  # B (out, R)
        nn.init.kaiming_uniform_(self.reduce, a=math.sqrt(5))  # as torch draws a linear layer

    def forward(self, x: Tensor) -> Tensor:
        low = nn.functional.linear(self.dropout(x), self.reduce)  # (..., R)
        return self.base(x) + self.scale * nn.functional.linear(low, self.expand)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        self.base.weight += self.scale * (self.expand @ self.reduce)
        return self.base


def add_lora(network: nn.Module, config: Lora) -> None:
    """Freeze the network and put an addition beside each linear layer whose name ends in a target."""
    network.requires_grad_(False)
    linears = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    own = {name: name.rpartition(".")[2] for name in linears}
    chosen = [name for name in linears if own[name] in config.targets]
    strange = [target for target in config.targets if target not in {*own.values(), *Lora.targets}]
    if strange or not chosen:  # of the default ones a model need not have all
        raise unknown_name("linear layer of this model:", " or ".join(strange or config.targets), {*own.values()})
    for name in chosen:
        network.set_submodule(name, LoraLinear(linears[name], config))


def merge_lora(network: nn.Module) -> None:
    """Fold the additions into the weights, which can be trained again."""
    for name, part in list(network.named_modules()):
        if isinstance(part, LoraLinear):
            network.set_submodule(name, part.merged())
    network.requires_grad_(True)
