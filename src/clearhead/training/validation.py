"""Compute the loss on the validation data.

validation = validate(learner, dataset); validation.loss
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch

from clearhead.data import Dataset, Preferences, evaluation_batches
from clearhead.training.learner import Learner
from clearhead.training.preference import PreferenceLosses


@dataclass(frozen=True)
class Validation:
    """Means over the validation data."""

    loss: float
    margin: float | None = None  # mean margin of preferences
    accuracy: float | None = None  # of preferences: the share of pairs whose margin is above 0

    @property
    def metrics(self) -> dict[str, float]:
        """The values as a row of metrics.jsonl."""
        values = {"validation_loss": self.loss, "margin": self.margin, "accuracy": self.accuracy}
        return {name: value for name, value in values.items() if value is not None}


def validate(
    learner: Learner, dataset: Dataset, progress: Callable[[int, int], None] = lambda num_batches, total: None
) -> Validation:
    """Return the means over the first `validate_batches` batches, over all processes.

    Keep the weights if they are the best so far. Batches are computed in the parts of a training step, because a whole
    batch may not fit into memory. `progress` is called with the number of batches done and their total.
    """
    config, world = learner.config, learner.world
    parts = evaluation_batches(
        dataset,
        config.batch_size,
        rank=world.data_rank,
        world_size=world.num_data_ranks,
        num_parts=config.accumulation,
    )
    num_batches = min(config.validate_batches, -(-len(dataset) // config.batch_size))
    sums = torch.zeros(2, device=world.device)  # total loss, number of losses
    margin_sums = torch.zeros(2, device=world.device)  # total margin, number of margins above 0
    learner.objective.eval()
    with learner.evaluation_weights():
        with torch.no_grad():
            for number, part in enumerate(islice(parts, num_batches * config.accumulation)):
                progress(number // config.accumulation, num_batches)
                losses = learner.objective(part.to(world.device))
                sums += torch.stack((losses.cross_entropy, torch.tensor(float(part.num_losses), device=world.device)))
                if isinstance(losses, PreferenceLosses):
                    margin_sums += torch.stack((losses.margins.sum(), (losses.margins > 0).sum()))
        total, count = world.sum(sums).tolist()
        progress(num_batches, num_batches)
        learner.keep_if_best(total / count)
    learner.objective.train()
    if not isinstance(dataset, Preferences):
        return Validation(total / count)
    margin, num_preferred = world.sum(margin_sums).tolist()
    return Validation(total / count, margin / count, num_preferred / count)
