"""The loss on data that training never sees.

loss = validate(learner, dataset, config, world)
"""

from itertools import islice

import torch

from clearhead.data import Dataset, in_order
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.learner import Learner


def validate(learner: Learner, dataset: Dataset, config: TrainConfig, world: World) -> float:
    """Nats for each target of the first `validate_batches` batches, over all ranks; the best weights are kept.

    Batches come in the parts of an update, since more rows at once may not fit.
    """
    parts = in_order(
        dataset,
        config.batch_size,
        rank=world.data_rank,
        world_size=world.data_size,
        num_parts=config.accumulation,
    )
    sums = torch.zeros(2, device=world.device)  # of the loss, and of the targets
    learner.objective.eval()
    with learner.judged():
        with torch.no_grad():
            for part in islice(parts, config.validate_batches * config.accumulation):
                losses = learner.objective(part.to(world.device))
                sums += torch.stack((losses.cross_entropy, torch.tensor(float(part.num_targets), device=world.device)))
        total, count = world.sum(sums).tolist()
        learner.consider(total / count)
    learner.objective.train()
    return total / count
