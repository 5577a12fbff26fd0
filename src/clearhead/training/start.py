"""How a run begins, new or resumed: all that a recipe names is made, and what was saved is put back.

setup, learner, loader, first_step = begin(recipe, RunFolder("runs/x"), world)
"""

from pathlib import Path
from typing import Any

import torch

from clearhead.config import to_dict, to_toml
from clearhead.data import Loader
from clearhead.errors import ClearheadError, require
from clearhead.files import write_text
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.distributed import World
from clearhead.training.learner import Learner
from clearhead.training.lora import add_lora
from clearhead.training.recipe import Recipe, flat
from clearhead.training.setup import Setup, prepare

# What a resumed run may change: none of it enters the numbers, but for `steps`, which stretches the schedule.
FREE = (
    "steps log_every validate_every validate_batches save_every tensorboard samples num_workers device strategy compile"
)


def begin(recipe: Recipe, run: RunFolder, world: World) -> tuple[Setup, Learner, Loader, int]:
    config, saved = recipe.train, run.latest()
    if saved is not None:
        check_same(saved.state["recipe"], to_dict(recipe), run.path)
        more = f"{run.path} has made {saved.step} steps, more than train.steps {config.steps}"
        require(saved.step <= config.steps, f"the run in {more}; raise it, or begin elsewhere")
    setup = prepare(recipe, run.path, resumed=saved is not None)
    if world.is_main:
        write_text(run.path / "recipe.toml", to_toml(recipe))
        if saved is None and recipe.tokenizer is not None:
            setup.tokenizer.save(run.path / "tokenizer")
    if recipe.lora is not None:
        add_lora(setup.network, recipe.lora)
    learner = Learner(setup.network, config, world)
    loader = Loader(
        setup.train,
        config.batch_size,
        seed=config.seed,
        rank=world.data_rank,
        world_size=world.data_size,
        num_workers=config.num_workers,
    )
    torch.manual_seed(config.seed + world.data_rank)  # processes that read other rows drop other entries
    if saved is None:
        return setup, learner, loader, 0
    learner.restore(saved)
    return setup, learner, loader.resume(saved.state["loader"]), saved.step


def check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """A run goes on with the recipe it began with."""
    old, new = flat(before), flat(now)
    free = {f"train.{name}" for name in FREE.split()}
    for name in sorted(old.keys() | new.keys(), key=lambda name: (not name.endswith(".kind"), name)):
        if old.get(name) != new.get(name) and name not in free:
            raise ClearheadError(
                f"the run in {folder} began with {name} {old.get(name)!r}, the recipe now says {new.get(name)!r}; "
                "give another folder for another run"
            )
