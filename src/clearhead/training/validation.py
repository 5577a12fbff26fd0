"""Compute the loss on the validation data.

loss = validate(learner, dataset)
"""

from collections.abc import Callable
from itertools import islice

import torch

from clearhead.data import Dataset, evaluation_batches
from clearhead.training.learner import Learner


def validate(
    learner: Learner, dataset: Dataset, progress: Callable[[int, int], None] = lambda num_batches, total: None
) -> float:
    """Return the mean loss per target of the first `validate_batches` batches, over all processes.

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
    sums = torch.zeros(2, device=world.device)  # the loss and the number of targets
    learner.objective.eval()
    with learner.evaluation_weights():
        with torch.no_grad():
            for number, part in enumerate(islice(parts, num_batches * config.accumulation)):
                progress(number // config.accumulation, num_batches)
                losses = learner.objective(part.to(world.device))
                sums += torch.stack((losses.cross_entropy, torch.tensor(float(part.num_targets), device=world.device)))
        total, count = world.sum(sums).tolist()
        progress(num_batches, num_batches)
        learner.keep_if_best(total / count)
    learner.objective.train()
    return total / count
