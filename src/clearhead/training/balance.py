"""Balance the load of the experts in a mixture, by a loss or by a bias.

    monitor = RoutingMonitor(network, BalanceLoss()); hidden = network.hidden_states(tokens); loss = monitor.loss(mask)

Loss   E · Σ_e f_e P_e for each layer; f_e is the share of tokens that chose expert e and P_e its mean probability. It
       is k at perfect balance with k chosen experts, and larger otherwise (Fedus et al. 2021, eq. 4; Mixtral). The
       shares are those of one forward pass, because those of a whole step are known only after its last part.
Bias   The bias that affects the choice of experts but not their weights is raised by a small step for experts below
       the mean load and lowered for the others (Wang et al. 2024; DeepSeek-V3 §2.1.2). It does not affect the gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.config import CheckedConfig
from clearhead.errors import ClearheadError
from clearhead.model import RouterLayer, Transformer


@dataclass(frozen=True, kw_only=True)
class BalanceLoss(CheckedConfig):
    """Add a balance loss with this weight."""

    weight: float = 0.01


@dataclass(frozen=True, kw_only=True)
class BalanceBias(CheckedConfig):
    """Move the selection bias of each expert by `speed` after each step."""

    speed: float = 0.001


class RoutingMonitor:
    """Records the decisions of a network's routers in training.

    The masks (B, T), and (B, S) for the encoder of an encoder-decoder, are True for the tokens that count.
    """

    def __init__(self, network: nn.Module, balance: BalanceLoss | BalanceBias):
        self.routers = [module for module in network.modules() if isinstance(module, RouterLayer)]
        if not self.routers:
            raise ClearheadError("the model has no experts to balance; remove train.balance")
        if isinstance(balance, BalanceBias) and any(router.selection_bias is None for router in self.routers):
            raise ClearheadError("balance_bias needs routers with selection_bias; use balance_loss for this model")
        encoder: set[nn.Module] = set()  # empty if there is only one stack
        if isinstance(network, Transformer) and network.encoder is not None and network.decoder is not None:
            encoder = set(network.encoder.modules())
        self.is_in_encoder = [router in encoder for router in self.routers]
        self.records: dict[int, tuple[Tensor, Tensor]] = {}  # by router: scores (M, E), chosen (M, num_chosen)
        self.loads = [torch.zeros(len(router.weight), device=router.weight.device) for router in self.routers]
        for number, router in enumerate(self.routers):
            router.register_forward_hook(partial(self.record, number))

    def record(self, number: int, router: RouterLayer, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Store the scores and choices of a router, as a forward hook."""
        if router.training:
            self.records[number] = router.scores(router.logits(inputs[0])), output[1]

    def take_records(self, mask: Tensor | None, source_mask: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each router and its scores and choices in the last forward pass, then clear them."""
        for number, (scores, chosen) in self.records.items():
            own_mask = source_mask if self.is_in_encoder[number] else mask
            selected = slice(None) if own_mask is None else own_mask.flatten().bool()
            yield number, scores[selected], chosen[selected]
        self.records.clear()

    def loss(self, mask: Tensor | None = None, source_mask: Tensor | None = None) -> Tensor:
        """Return the mean balance loss over the layers of the last forward pass."""
        records = self.take_records(mask, source_mask)
        return torch.stack([balance_loss(scores, chosen) for _, scores, chosen in records]).mean()

    def count_loads(self, mask: Tensor | None = None, source_mask: Tensor | None = None) -> None:
        """Add the choices of the last forward pass to the loads of the experts."""
        for number, _, chosen in self.take_records(mask, source_mask):
            load = torch.bincount(chosen.flatten(), minlength=len(self.loads[number]))
            self.loads[number] = self.loads[number] + load.to(self.loads[number])

    @torch.no_grad()
    def update_biases(self, speed: float, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Move the biases according to the loads of all ranks, and reset the loads."""
        for number, router in enumerate(self.routers):
            assert router.selection_bias is not None
            load = sum_over_ranks(self.loads[number])
            router.selection_bias += speed * torch.sign(load.mean() - load).to(router.selection_bias.dtype)
            self.loads[number] = torch.zeros_like(load)


def balance_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """Return the balance loss of M tokens: scores (M, E), chosen (M, num_chosen). Scores are normalized to sum to 1."""
    num_experts = scores.shape[-1]
    probability = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)  # (E,)
    share = torch.bincount(chosen.flatten(), minlength=num_experts).to(scores.dtype) / len(chosen)
    return num_experts * (share * probability).sum()
