"""Hold everything that training changes and a checkpoint must contain: weights, optimizers, average and best weights.

learner = Learner(network, config, world); learner.update(step); learner.save(run, step, state); learner.restore(saved)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import ClearheadError
from clearhead.training.balance import BalanceBias, RoutingMonitor
from clearhead.training.checkpoints import (
    RunFolder,
    SavedCheckpoint,
    capture_random_state,
    flatten_optimizer,
    restore_optimizer,
    restore_random_state,
    restore_weights,
)
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.heap import reuse_freed_memory
from clearhead.training.objective import Network, build_objective, faster_precision
from clearhead.training.optimizer import build_optimizers


class Learner:
    """A network with its objective and optimizers, on the device of this process."""

    def __init__(
        self,
        network: Network,
        config: TrainConfig,
        world: World,
        make_objective: Callable[[Network, TrainConfig], nn.Module] | None = None,
    ):
        """`make_objective` returns another objective than the cross-entropy of the network's predictions."""
        if config.precision == "auto":
            config = replace(config, precision=faster_precision(world.device))
        self.network = network.to(world.device).train()
        self.config = config
        self.world = world
        if world.device.type == "cpu":
            reuse_freed_memory()
        self.routing = None if config.balance is None else RoutingMonitor(network, config.balance)
        sharded = world.size > 1 and world.strategy == "fsdp"
        dtype = torch.bfloat16 if config.precision == "bfloat16" else None
        objective = None if make_objective is None else make_objective(self.network, config).to(world.device)
        self.objective = world.wrap(
            build_objective(network, config, self.routing, to_bfloat16=not sharded, objective=objective), dtype
        )
        self.optimizers = build_optimizers(network, config.optimizer)
        self.average = _clone_weights(self.weights) if config.average is not None else {}
        self.best: dict[str, Tensor] = {}
        self.best_loss = float("inf")

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def weights(self) -> dict[str, Tensor]:
        """The tensors that training changes: parameters that are not frozen, and the routers' biases."""
        trained = {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}
        return trained | dict(self.network.named_buffers())

    def update(self, step: int) -> None:
        """Step the optimizers and clear the gradients, then update router biases and the moving average."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.routing is not None and isinstance(self.config.balance, BalanceBias):
            self.routing.update_biases(self.config.balance.speed, self.world.sum)
        if self.config.average is not None:
            # A lower decay at first, since the initial weights are noise (as TensorFlow's ExponentialMovingAverage).
            decay = min(self.config.average, (1 + step) / (10 + step))
            for name, weight in self.weights.items():
                self.average[name].lerp_(weight.detach(), 1 - decay)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Put the weights that are validated and saved into the network: the moving average if there is one."""
        if not self.average:
            yield
            return
        current = _clone_weights(self.weights)
        restore_weights(self.weights, self.average)
        try:
            yield
        finally:
            restore_weights(self.weights, current)

    def keep_if_best(self, validation_loss: float) -> None:
        """Store the current weights if their validation loss is the lowest. Call it inside `evaluation_weights`."""
        if self.config.keep == "best" and validation_loss < self.best_loss:
            self.best = _clone_weights(self.weights)
            self.best_loss = validation_loss

    def load_final_weights(self) -> None:
        """Put the weights of the trained model into the network: the best, the average or the last."""
        if self.best or self.average:
            restore_weights(self.weights, self.best or self.average)

    def save(self, run: RunFolder, step: int, state: dict[str, Any]) -> None:
        """Save a checkpoint with all tensors that training changes."""
        weights = self.weights
        moments = {k: v for optimizer in self.optimizers for k, v in flatten_optimizer(optimizer, weights).items()}
        groups = {"weights": weights, "optimizer": moments, "randomness": capture_random_state()}
        extra = {name: tensors for name, tensors in (("average", self.average), ("best", self.best)) if tensors}
        run.save(step, groups | extra, state | {"best_loss": self.best_loss if self.best else None})

    def restore(self, saved: SavedCheckpoint) -> None:
        """Restore everything that `save` stored. Raise ClearheadError if the checkpoint does not fit or is damaged."""
        try:
            self._restore(saved)
        except ClearheadError as error:
            raise ClearheadError(
                f"{saved.folder} cannot be resumed: {error}; delete it to resume from an earlier checkpoint"
            ) from None

    def _restore(self, saved: SavedCheckpoint) -> None:
        weights = self.weights
        restore_weights(weights, saved.tensors("weights", weights))
        moments = saved.tensors("optimizer", weights)
        for optimizer in self.optimizers:
            restore_optimizer(optimizer, weights, moments)
        if self.average:
            restore_weights(self.average, saved.tensors("average", weights))
        best_loss = saved.state.get("best_loss")
        if isinstance(best_loss, int | float):
            self.best = saved.tensors("best", weights)
            self.best_loss = float(best_loss)
        random_state = saved.tensors("randomness")
        if random_state:
            restore_random_state(random_state)


def _clone_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}
