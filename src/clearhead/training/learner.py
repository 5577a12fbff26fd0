"""Everything that training changes, and that a checkpoint must hold: weights, optimizers, averages, the best so far.

learner = Learner(network, config, world); learner.update(); learner.save(run, step, state); learner.restore(saved)
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clearhead.training.balance import BalanceBias, Routing
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.checkpoints.saved import Saved
from clearhead.training.checkpoints.state import (
    capture_randomness,
    flatten_optimizer,
    restore_optimizer,
    restore_randomness,
    restore_weights,
)
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.objective import Network, build_objective, faster_precision
from clearhead.training.optimizer import build_optimizers

Weights = dict[str, Tensor]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
KEPT_BYTES = 1 << 30


class Learner:
    def __init__(self, network: Network, config: TrainConfig, world: World):
        if config.precision == "auto":
            config = replace(config, precision=faster_precision(world.device))
        self.network, self.config, self.world = network.to(world.device).train(), config, world
        if world.device.type == "cpu":
            keep_freed_memory()
        self.routing = None if config.balance is None else Routing(network, config.balance)
        sharded = world.size > 1 and world.strategy == "fsdp"
        half = torch.bfloat16 if config.precision == "bfloat16" else None
        self.objective = world.wrap(build_objective(network, config, self.routing, cast=not sharded), half)
        self.optimizers = build_optimizers(network, config.optimizer)
        self.average = clones(self.weights) if config.average is not None else {}
        self.best: Weights = {}
        self.best_loss = float("inf")

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @property
    def weights(self) -> Weights:
        """What is trained: parameters that are not frozen, and the routers' biases."""
        trained = {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}
        return trained | dict(self.network.named_buffers())

    def update(self, step: int) -> None:
        """One step of the optimizers along the gradients, which are then gone, and all that follows it."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.routing is not None and isinstance(self.config.balance, BalanceBias):
            self.routing.move_biases(self.config.balance.speed, self.world.sum)
        if self.config.average is not None:
            # Early on the average is over the steps so far: its start is noise.
            pull = 1 - min(self.config.average, (1 + step) / (10 + step))
            for name, weight in self.weights.items():
                self.average[name].lerp_(weight.detach(), pull)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """The weights that are validated and saved in place: the average where there is one."""
        if not self.average:
            yield
            return
        current = clones(self.weights)
        restore_weights(self.weights, self.average)
        try:
            yield
        finally:
            restore_weights(self.weights, current)

    def consider(self, validation_loss: float) -> None:
        """Keep the judged weights where they are the best so far; call it inside `judged`."""
        if self.config.keep == "best" and validation_loss < self.best_loss:
            self.best, self.best_loss = clones(self.weights), validation_loss

    def finish(self) -> None:
        """Put the weights to keep into the network."""
        if self.best or self.average:
            restore_weights(self.weights, self.best or self.average)

    def save(self, run: RunFolder, step: int, state: dict[str, Any]) -> None:
        weights = self.weights
        optimizer = {k: v for rule in self.optimizers for k, v in flatten_optimizer(rule, weights).items()}
        groups = {"weights": weights, "optimizer": optimizer, "randomness": capture_randomness()}
        extra = {name: tensors for name, tensors in (("average", self.average), ("best", self.best)) if tensors}
        run.save(step, groups | extra, state | {"best_loss": self.best_loss if self.best else None})

    def restore(self, saved: Saved) -> None:
        weights = self.weights
        restore_weights(weights, saved.tensors("weights", weights))
        tensors = saved.tensors("optimizer", weights)
        for rule in self.optimizers:
            restore_optimizer(rule, weights, tensors)
        if self.average:
            restore_weights(self.average, saved.tensors("average", weights))
        if saved.state["best_loss"] is not None:
            self.best, self.best_loss = saved.tensors("best", weights), saved.state["best_loss"]
        randomness = saved.tensors("randomness")
        if randomness:
            restore_randomness(randomness)


def keep_freed_memory() -> None:
    """Let malloc keep what a backward frees for the next forward.

    As it comes, glibc gives large pieces and the end of the heap back to the system each time; to fault them in again
    was an eighth of the compiled step of a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def clones(weights: Weights) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}
