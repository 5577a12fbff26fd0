"""Tune a model on preferences by direct preference optimization, DPO (Rafailov et al. 2023, equation 7).

    objective = PreferenceObjective(network, config, Dpo(beta=0.1), reference); losses = objective(preference_batch)

For a prompt x with a chosen answer y_w and a rejected one y_l, the loss is −log σ(margin) with

    margin = β · [log π(y_w | x) − log π_ref(y_w | x)] − β · [log π(y_l | x) − log π_ref(y_l | x)]

π is the network and π_ref the reference, the network before tuning. The log-probability of an answer is the sum over
its tokens. β limits how far the network may move away from the reference.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from clearhead.config import CheckedConfig
from clearhead.data import IGNORED, PreferenceBatch
from clearhead.model import Transformer
from clearhead.training.config import TrainConfig
from clearhead.training.lora import disable_lora
from clearhead.training.objective import bind_current_weights, hidden_states


@dataclass(frozen=True, kw_only=True)
class Dpo(CheckedConfig):
    """The [dpo] table of a recipe."""

    beta: float = 0.1  # 0.1 to 0.5 in the paper; a larger value keeps the network closer to the reference


class PreferenceLosses(NamedTuple):
    """Sums over the pairs, and the margins."""

    total: Tensor  # to minimize
    cross_entropy: Tensor  # the loss again, under the name by which the training loop reports it
    margins: Tensor  # (B / 2,) of the pairs; 0 for a pair without targets


class PreferenceObjective(nn.Module):
    """A network, the reference that it starts from, and the loss of DPO.

    Without `reference`, the network itself without its adapters is the reference (LoRA).
    """

    def __init__(self, network: Transformer, config: TrainConfig, dpo: Dpo, reference: Transformer | None = None):
        super().__init__()
        self.network, self.config, self.beta = network, config, dpo.beta
        self.reference = None if reference is None else reference.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        """Switch to training or evaluation. The reference never uses dropout."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    def forward(self, batch: PreferenceBatch) -> PreferenceLosses:
        """Return the losses, summed over the pairs of a batch."""
        ratios = self._log_probabilities(self.network, batch) - self._reference_log_probabilities(batch)
        chosen, rejected = ratios.view(-1, 2).unbind(dim=1)  # (B / 2,) each
        margins = (self.beta * (chosen - rejected)).masked_fill(~batch.has_loss, 0.0)
        losses = -functional.logsigmoid(margins).masked_fill(~batch.has_loss, 0.0)
        return PreferenceLosses(losses.sum(), losses.sum().detach(), margins.detach())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _reference_log_probabilities(self, batch: PreferenceBatch) -> Tensor:
        if self.reference is not None:
            return self._log_probabilities(self.reference, batch)
        with _evaluation_mode(self.network), disable_lora(self.network):
            return self._log_probabilities(self.network, batch)

    def _log_probabilities(self, network: Transformer, batch: PreferenceBatch) -> Tensor:
        """Return the log-probability of the targets of each row (B,). Logits are computed at the targets only."""
        hidden = hidden_states(network, batch)  # (B, T, D)
        has_target = batch.targets != IGNORED
        by_target = _log_probabilities_of(
            hidden[has_target],
            batch.targets[has_target],
            bind_current_weights(network, network.compute_logits),
            self.config.chunk_tokens,
        )
        by_token = by_target.new_zeros(batch.targets.shape).masked_scatter(has_target, by_target)
        return by_token.sum(dim=1)


def _log_probabilities_of(
    states: Tensor, targets: Tensor, compute_logits: Callable[[Tensor], Tensor], chunk_tokens: int | None
) -> Tensor:
    """Return log p of each target (M,) from hidden states (M, D), for `chunk_tokens` of them at a time."""

    def log_probabilities(states: Tensor, targets: Tensor) -> Tensor:
        logits = compute_logits(states[None])[0]
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -functional.cross_entropy(precise, targets, reduction="none")

    if chunk_tokens is None:
        return log_probabilities(states, targets)
    parts = [
        checkpoint(log_probabilities, *chunk, use_reentrant=False)
        for chunk in zip(states.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return torch.cat(parts)


@contextmanager
def _evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Turn dropout off for the duration of a `with` block."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)
