"""Summarize a run before its first step: model, data and training settings in a few lines.

for line in summarize_run(recipe, setup, learner): reporter.print(line)
"""

import math

from clearhead.config import kind_of
from clearhead.training.learner import Learner
from clearhead.training.recipe import Recipe
from clearhead.training.setup import Setup


def summarize_run(recipe: Recipe, setup: Setup, learner: Learner) -> list[str]:
    """Return one line each about the model, the data and the training settings."""
    return [_model_line(recipe, learner), _data_line(recipe, setup), _train_line(learner)]


def _model_line(recipe: Recipe, learner: Learner) -> str:
    slice_of = learner.world.slice_of  # a process may hold only a part of a weight
    parameters = [
        (math.prod(slice_of(weight).full_shape), weight.requires_grad) for weight in learner.network.parameters()
    ]
    total = sum(count for count, _ in parameters)
    trained = sum(count for count, is_trained in parameters if is_trained)
    share = "all trained" if trained == total else f"{trained:,} of them trained ({trained / total:.2%})"
    adapters = "" if recipe.lora is None else f" in adapters of rank {recipe.lora.rank}"
    name = getattr(recipe.model, "name", None)
    kind = kind_of(type(recipe.model)) + (f" {name}" if name else "")
    return f"model  {kind}: {total:,} parameters, {share}{adapters}"


def _data_line(recipe: Recipe, setup: Setup) -> str:
    data = recipe.data
    origin = getattr(data, "path", None) or getattr(data, "task", None)
    kind = kind_of(type(data)) + (f" {origin}" if origin else "")
    rows = f"{len(setup.train_data):,} training and {len(setup.validation_data):,} validation rows"
    dropped = f"; {setup.num_too_long:,} examples longer than data.context were dropped" if setup.num_too_long else ""
    return f"data   {kind}: {rows} of at most {data.context:,} tokens{dropped}"


def _train_line(learner: Learner) -> str:
    config = learner.config
    optimizer, schedule = kind_of(type(config.optimizer)), kind_of(type(config.schedule))
    warmup = config.schedule.warmup_steps
    warm_up = f" with a warm-up of {warmup:,}" if warmup else ""
    return (
        f"train  {config.steps:,} steps of {config.batch_size:,} rows; {optimizer} at "
        f"{config.optimizer.learning_rate:g}, {schedule} schedule{warm_up}; "
        f"{config.precision} on {learner.world.device.type}"
    )
