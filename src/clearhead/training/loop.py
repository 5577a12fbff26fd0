"""The road, top to bottom: learning rate, batch, loss, backward, clip, step, log, validate, save. No callbacks.

    train(read_recipe("capitals").recipe, Path("runs/capitals"))

A run that was interrupted goes on from its last checkpoint, with the very same numbers.
"""

from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from clearhead.config import to_dict
from clearhead.data import Batch
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.display import Display
from clearhead.training.distributed import World
from clearhead.training.finish import finish, refuse
from clearhead.training.learner import Learner
from clearhead.training.metrics import Journal, Meter
from clearhead.training.optimizer import set_rates
from clearhead.training.recipe import Recipe
from clearhead.training.schedule import factor
from clearhead.training.signals import Stopper
from clearhead.training.start import begin
from clearhead.training.validate import validate


@dataclass(frozen=True)
class Trained:
    folder: Path  # the model is in its `model`
    num_steps: int
    loss: float | None  # of the last step; None: all steps had been made before
    validation_loss: float | None  # of the last weights, or of the best where these are kept


def train(recipe: Recipe, out: Path, console: Console | None = None, opening: str = "") -> Trained:
    """`opening` is said once the recipe and its data have turned out to be sound."""
    config, console = recipe.train, console or Console(stderr=True, highlight=False, emoji=False)
    loss = validation_loss = None
    with World.start(config.strategy, config.device) as world:
        run = RunFolder(out, world=world)
        with run.lock():
            with console.status("preparing") if world.is_main else nullcontext():
                setup, learner, loader, first_step = begin(recipe, run, world)
            meter = Meter(setup.network, world.device)
            opened = closing(Journal(out, first_step, config.tensorboard)) if world.is_main else nullcontext()
            shown = Display(console, config.steps, first_step, silent=not world.is_main)
            with Stopper() as stop, opened as journal, shown as display:
                if opening:
                    display.say(opening)
                if config.precision == "auto":
                    display.say(f"computes in {learner.config.precision}")
                if setup.num_left_out:
                    display.say(f"{setup.num_left_out} examples are longer than data.context and left out")
                if first_step:
                    display.say(f"{first_step} of {config.steps} steps were made before")
                for step, (batch, loader_state) in zip(range(first_step, config.steps), loader, strict=False):
                    rate = factor(config.schedule, step, num_steps=config.steps, width=setup.network.config.width)
                    set_rates(learner.optimizers, rate)
                    num_targets = world.sum(torch.tensor(batch.num_targets, device=world.device)).clamp(min=1)
                    batch = batch.to(world.device)
                    total = world.sum(accumulate(learner, batch, num_targets))
                    length = world.clip_gradients(setup.network.parameters(), config.clip)
                    # The one wait for the device in a step: what is not finite must not be learned from.
                    loss, norm, num_read = torch.stack((total, length, num_targets)).tolist()
                    refuse(step, loss, norm, batch, setup.tokenizer, out, world.rank)
                    learner.update(step)

                    done = step + 1
                    meter.count(int(num_read))
                    if done % config.log_every == 0 or done == config.steps:
                        row = {"step": done, "loss": loss, "learning_rate": learner.rate, "gradient_norm": norm}
                        row |= meter.read(batch.tokens.shape[1], num_steps_left=config.steps - done)
                        display.show(row)
                        if journal is not None:
                            journal.write(row)
                    if done % config.validate_every == 0 or done == config.steps:
                        validation_loss = validate(learner, setup.validation, config, world)
                        display.show({"step": done, "validation_loss": validation_loss})
                        if journal is not None:
                            journal.write({"step": done, "validation_loss": validation_loss})
                        meter.restart()
                    asked_to_stop = world.any(stop.asked)
                    if done % config.save_every == 0 or done == config.steps or asked_to_stop:
                        learner.save(run, done, {"loader": loader_state, "recipe": to_dict(recipe)})
                        meter.restart()
                    if asked_to_stop:
                        display.say(f"stopped and saved at step {done}; the same command goes on from there")
                        raise SystemExit(stop.exit_code)
                finish(recipe, setup, learner, out, display)
    if learner.best:
        validation_loss = learner.best_loss
    return Trained(out, config.steps, loss, validation_loss)


def accumulate(learner: Learner, batch: Batch, num_targets: Tensor) -> Tensor:
    """Gradients of the loss for each target of the whole update, in as many parts as asked for; that loss."""
    loss = torch.zeros((), device=batch.tokens.device)
    parts = split(batch, learner.config.accumulation)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        with nullcontext() if last else learner.world.no_sync(learner.objective):
            losses = learner.objective(part)
            (losses.total / num_targets).backward()
        loss = loss + losses.cross_entropy
    return loss / num_targets


def split(batch: Batch, num_parts: int) -> list[Batch]:
    """The rows of a batch in equal parts."""
    if num_parts == 1:
        return [batch]
    given = {name: part.chunk(num_parts) for name, part in vars(batch).items() if part is not None}
    num_made = len(given["tokens"])
    return [Batch(**{name: parts[number] for name, parts in given.items()}) for number in range(num_made)]
