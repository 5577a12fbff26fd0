"""Keeping the experts of a mixture equally busy: by a loss, or by moving a bias.

    routing = Routing(network, BalanceLoss()); hidden = network.hidden(tokens); penalty = routing.loss(mask)

By loss   E · Σ_e f_e P_e for each layer, with f_e the share of tokens that chose expert e and P_e its mean probability:
          k at perfect balance of k chosen experts, more otherwise (Fedus et al. 2021, eq. 4; Mixtral). Shares are of
          what one forward reads: those of a whole update are known only after the last part's forward.
By bias   the bias that decides the choice, but not the weights, goes up by a small step for experts with less than the
          mean load and down for the others (Wang et al. 2024; DeepSeek-V3 §2.1.2). No gradient is disturbed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.config import Checked
from clearhead.errors import ClearheadError
from clearhead.model import RouterLayer, Transformer


@dataclass(frozen=True, kw_only=True)
class BalanceLoss(Checked):
    weight: float = 0.01


@dataclass(frozen=True, kw_only=True)
class BalanceBias(Checked):
    speed: float = 0.001


class Routing:
    """Listens to the routers of a network while it trains; only tokens that masks (B, T), of a source (B, S), show."""

    def __init__(self, network: nn.Module, balance: BalanceLoss | BalanceBias):
        self.routers = [part for part in network.modules() if isinstance(part, RouterLayer)]
        if not self.routers:
            raise ClearheadError("there are no experts to balance in this model; leave train.balance out")
        if isinstance(balance, BalanceBias) and any(router.selection_bias is None for router in self.routers):
            raise ClearheadError("balance by bias needs routers with selection_bias; use balance_loss here")
        encoder: set[nn.Module] = set()  # where it is not the only stack
        if isinstance(network, Transformer) and network.encoder is not None and network.decoder is not None:
            encoder = set(network.encoder.modules())
        self.in_encoder = [router in encoder for router in self.routers]
        self.residuals: dict[int, tuple[Tensor, Tensor]] = {}  # by router: scores (M, E), chosen (M, num_chosen)
        self.loads = [torch.zeros(len(router.weight), device=router.weight.device) for router in self.routers]
        for number, router in enumerate(self.routers):
            router.register_forward_hook(partial(self.listen, number))

    def listen(self, number: int, router: RouterLayer, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        if router.training:
            self.residuals[number] = router.scores(router.logits(inputs[0])), output[1]

    def last(self, mask: Tensor | None, source_mask: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each router's number, and the scores and choices of real tokens in the last forward, which are then gone."""
        for number, (scores, chosen) in self.residuals.items():
            own = source_mask if self.in_encoder[number] else mask
            real = slice(None) if own is None else own.flatten().bool()
            yield number, scores[real], chosen[real]
        self.residuals.clear()

    def loss(self, mask: Tensor | None = None, source_mask: Tensor | None = None) -> Tensor:
        """Mean over the layers of the last forward."""
        return torch.stack([balance_loss(*residuals) for _, *residuals in self.last(mask, source_mask)]).mean()

    def count(self, mask: Tensor | None = None, source_mask: Tensor | None = None) -> None:
        """Add the last forward to the loads."""
        for number, _, chosen in self.last(mask, source_mask):
            load = torch.bincount(chosen.flatten(), minlength=len(self.loads[number]))
            self.loads[number] = self.loads[number] + load.to(self.loads[number])

    @torch.no_grad()
    def move_biases(self, speed: float, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """By the loads since the last time, summed over all ranks."""
        for number, router in enumerate(self.routers):
            assert router.selection_bias is not None
            load = over_ranks(self.loads[number])
            router.selection_bias += speed * torch.sign(load.mean() - load).to(router.selection_bias.dtype)
            self.loads[number] = torch.zeros_like(load)


def balance_loss(scores: Tensor, chosen: Tensor) -> Tensor:
    """scores (M, E), chosen (M, num_chosen) of M tokens. Sigmoid scores are made to sum to 1."""
    num_experts = scores.shape[-1]
    probability = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)  # (E,)
    share = torch.bincount(chosen.flatten(), minlength=num_experts).to(scores.dtype) / len(chosen)
    return num_experts * (share * probability).sum()
