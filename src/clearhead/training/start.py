"""Start a run, new or resumed: build everything that the recipe names and restore the last checkpoint.

setup, learner, loader, first_step = start_run(recipe, RunFolder("runs/x"), world)
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from clearhead.config import to_dict, to_toml
from clearhead.data import Loader
from clearhead.errors import ClearheadError, require
from clearhead.files import write_text
from clearhead.model import Transformer
from clearhead.training.checkpoints import RunFolder, seed_generators
from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World
from clearhead.training.learner import Learner
from clearhead.training.lora import Lora, add_lora
from clearhead.training.objective import Network
from clearhead.training.overrides import flatten
from clearhead.training.preference import Dpo, PreferenceObjective
from clearhead.training.recipe import Recipe
from clearhead.training.setup import Setup, prepare

# A resumed run may change these settings of [train]. `steps` stretches the schedule; device, strategy and compile
# change at most the order of sums (and what dropout draws); the others do not affect the numbers.
_CHANGEABLE = (
    *("steps", "log_every", "validate_every", "validate_batches", "save_every", "tracker", "project", "samples"),
    *("num_workers", "device", "strategy", "compile"),
)


def start_run(recipe: Recipe, run: RunFolder, world: World) -> tuple[Setup, Learner, Loader, int]:
    """Return the setup, the learner, the loader and the number of steps that are already completed.

    Write recipe.toml and the tokenizer into the run folder.
    """
    config, saved = recipe.train, run.latest()
    if saved is not None:
        check_same_recipe(saved.state_table("recipe"), to_dict(recipe), run.path)
        require(
            saved.step <= config.steps,
            f"the run in {run.path} has completed {saved.step} steps, more than train.steps {config.steps}; "
            "raise train.steps or choose another folder",
        )
        run.delete_surplus(saved)
    setup = prepare(recipe, run.path, resumed=saved is not None)
    if world.is_main:
        write_text(run.path / "recipe.toml", to_toml(recipe))
        if saved is None and recipe.tokenizer is not None:
            setup.tokenizer.save(run.path / "tokenizer")
    make_objective = None if recipe.dpo is None else _preference_objective(setup.network, recipe.dpo, recipe.lora)
    if recipe.lora is not None:
        add_lora(setup.network, recipe.lora)
    learner = Learner(setup.network, config, world, make_objective)
    loader = Loader(
        setup.train_data,
        config.batch_size,
        seed=config.seed,
        rank=world.data_rank,
        world_size=world.num_data_ranks,
        num_workers=config.num_workers,
    )
    seed_generators(config.seed + world.data_rank)  # processes that read different rows need different dropout
    if saved is None:
        return setup, learner, loader, 0
    learner.restore(saved)
    return setup, learner, loader.resume(saved.state_table("loader")), saved.step


def _preference_objective(
    network: Network, dpo: Dpo, lora: Lora | None
) -> Callable[[Network, TrainConfig], PreferenceObjective]:
    """Return what makes the objective of DPO; the weights that `network` has now are the reference."""
    assert isinstance(network, Transformer)
    reference = copy.deepcopy(network) if lora is None else None
    return lambda network, config: PreferenceObjective(cast(Transformer, network), config, dpo, reference)


def check_same_recipe(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise ClearheadError if a run is resumed with a recipe that would change its numbers.

    If several values differ, the error names a `kind` rather than another value.
    """
    old, new = flatten(before), flatten(now)
    changeable = {f"train.{name}" for name in _CHANGEABLE}
    for name in sorted(old.keys() | new.keys(), key=lambda name: (not name.endswith(".kind"), name)):
        if old.get(name) != new.get(name) and name not in changeable:
            raise ClearheadError(
                f"the run in {folder} started with {name} {old.get(name)!r}, but the recipe now has {new.get(name)!r}; "
                "choose another folder for a new run"
            )
