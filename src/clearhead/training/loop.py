"""Train a model: the training loop, from the learning rate to the saved checkpoint.

    train("capitals", "runs/capitals", train={"steps": 1000})

The steps of the loop are numbered as in docs/training.md. An interrupted run resumes from its last checkpoint and
computes the same numbers as a run without interruption.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from clearhead.config import to_dict
from clearhead.data import Batch
from clearhead.home import expand_user
from clearhead.terminal import TerminalConsole
from clearhead.training.checkpoints import RunFolder
from clearhead.training.distributed import World
from clearhead.training.final_summary import summarize_result
from clearhead.training.finish import finish_run
from clearhead.training.finite_check import abort_if_not_finite
from clearhead.training.learner import Learner
from clearhead.training.optimizer import set_learning_rates
from clearhead.training.recipe import Recipe, ResolvedRecipe, resolve
from clearhead.training.reporter import Reporter
from clearhead.training.result import TrainingResult
from clearhead.training.run_summary import summarize_run
from clearhead.training.schedule import learning_rate_factor
from clearhead.training.setup import Setup
from clearhead.training.signals import StopSignals
from clearhead.training.start import start_run
from clearhead.training.validation import validate


def train(
    recipe: str | Path | Recipe | ResolvedRecipe,
    out: str | Path,
    console: Console | None = None,
    *,
    smoke: bool = False,
    **overrides: Any,
) -> TrainingResult:
    """Train a model and return the result of the run.

    recipe     The name of a recipe (see `clearhead train --list`), a TOML file, or a recipe that has been read.
    out        The folder of the run. If it contains a checkpoint, the run resumes from it.
    console    Where to print progress; stderr by default.
    smoke      Apply the recipe's [smoke] table, which gives a very small version of it.
    overrides  Tables with values that replace those of the recipe: train={"steps": 100}, data={"path": "my.txt"}.

    Raise ClearheadError if the recipe or the data cannot be used, or if the loss is not finite. Raise SystemExit after
    SIGTERM or Ctrl-C, when a checkpoint has been saved.
    """
    resolved = resolve(recipe, overrides, smoke)
    recipe = resolved.recipe
    config = recipe.train
    out = expand_user(out)
    console = console or TerminalConsole(stderr=True)
    loss = validation_loss = None
    with World.start(config.strategy, config.device) as world:
        run = RunFolder(out, world=world)
        with run.lock():
            with console.status("preparing") if world.is_main else nullcontext():
                setup, learner, loader, first_step = start_run(recipe, run, world)
            with StopSignals() as stop, Reporter(console, out, learner, first_step, to_dict(recipe)) as reporter:
                _print_opening(reporter, resolved, setup, learner, first_step)
                width = setup.network.config.width
                # The loader is endless, so the range of steps ends the loop.
                for step, (batch, loader_state) in zip(range(first_step, config.steps), loader, strict=False):
                    # 1. Learning rate.
                    factor = learning_rate_factor(config.schedule, step, num_steps=config.steps, width=width)
                    set_learning_rates(learner.optimizers, factor)
                    # 2. Batch: this process's rows, and the number of losses and targets of all processes.
                    counts = world.sum(torch.tensor((batch.num_losses, batch.num_targets), device=world.device))
                    batch = batch.to(world.device)
                    # 3. Loss, and 4. backward pass.
                    mean_loss = world.sum(accumulate_gradients(learner, batch, counts[0].clamp(min=1)))
                    # 5. Clip the gradient.
                    norm = world.clip_gradients(setup.network.parameters(), config.clip)
                    # 6. Check that loss and gradient are finite: the only time that a step waits for the device.
                    loss, gradient_norm, num_targets = torch.stack((mean_loss, norm, counts[1])).tolist()
                    abort_if_not_finite(step, loss, gradient_norm, batch, setup.tokenizer, out, world.rank)
                    # 7. Optimizer step.
                    learner.update(step)
                    completed = step + 1
                    # 8. Log.
                    reporter.log_step(completed, loss, gradient_norm, int(num_targets), batch.tokens.shape[1])
                    # 9. Validate.
                    if config.is_due(completed, config.validate_every):
                        validation = validate(learner, setup.validation_data, reporter.show_validation)
                        validation_loss = validation.loss
                        reporter.log_validation(completed, validation.metrics)
                    # 10. Save.
                    must_stop = world.any(stop.requested)
                    if must_stop or config.is_due(completed, config.save_every):
                        learner.save(run, completed, {"loader": loader_state, "recipe": to_dict(recipe)})
                        reporter.restart_meter()
                    if must_stop:
                        reporter.print(f"stopped and saved at step {completed}; run the same command again to resume")
                        raise SystemExit(stop.exit_code)
                finished = finish_run(recipe, setup, learner, out, reporter)
            final_loss = learner.best_loss if learner.best else validation_loss
            if finished is None:  # not the main process
                return TrainingResult(out, config.steps, loss, final_loss)
            result = TrainingResult(out, config.steps, loss, final_loss, finished.samples[0].text)
            for line in summarize_result(result, finished.model, finished.samples):
                reporter.print(line)
    return result


def _print_opening(
    reporter: Reporter, resolved: ResolvedRecipe, setup: Setup, learner: Learner, first_step: int
) -> None:
    """Print a summary of the run and what the user should know before the first step."""
    for line in (*summarize_run(resolved.recipe, setup, learner), *resolved.notes):
        reporter.print(line)
    if first_step:
        reporter.print(f"resuming after {first_step} of {learner.config.steps} steps")


def accumulate_gradients(learner: Learner, batch: Batch, num_losses: Tensor) -> Tensor:
    """Compute the gradient of the mean loss in `accumulation` parts, and return this loss.

    `num_losses` is the number of losses of the whole step, over all parts and processes: one for each target, or for
    each pair of preferences.
    """
    loss = torch.zeros((), device=batch.tokens.device)
    parts = split_batch(batch, learner.config.accumulation)
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        with nullcontext() if is_last else learner.world.no_sync(learner.objective):
            losses = learner.objective(part)
            (losses.total / num_losses).backward()
        loss = loss + losses.cross_entropy
    return loss / num_losses


def split_batch(batch: Batch, num_parts: int) -> list[Batch]:
    """Divide the rows of a batch into parts of equal size; the last part may be smaller."""
    if num_parts == 1:
        return [batch]
    chunks = {name: tensor.chunk(num_parts) for name, tensor in vars(batch).items() if tensor is not None}
    num_chunks = len(chunks["tokens"])
    return [type(batch)(**{name: parts[number] for name, parts in chunks.items()}) for number in range(num_chunks)]
