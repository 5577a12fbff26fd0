"""Train models from recipes, in run folders that survive interruptions.

Start with `loop.py`, which contains the training loop. It uses, in this order:

    recipe, recipe_catalog    read a TOML file (models, config: its tables; overrides; recipe_help: its keys)
    start, setup              build tokenizer, data and network, or restore a checkpoint
    run_summary               model, data and settings in a few lines, before the first step
    schedule                  the learning rate
    objective                 a batch to its loss (loss, head_loss, triton_loss, balance; preference: DPO)
    distributed               several processes (tensor_slice: the part of a tensor in one)
    learner                   weights, optimizers and averages (optimizer, lora, heap)
    reporter                  log metrics (display, metrics, trackers)
    validation                the validation loss
    checkpoints               save and restore
    signals                   stop on SIGTERM and Ctrl-C
    finite_check              abort if the loss or the gradient is not finite
    finish, final_summary     save the model, samples and the loss curve (curve), and print what to try next (result)

Names are imported on first use, so that a wrong name of a recipe is answered before torch is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clearhead.training.config import TrainConfig
    from clearhead.training.distributed import World, is_main_process
    from clearhead.training.heap import reuse_freed_memory
    from clearhead.training.learner import Learner
    from clearhead.training.loop import accumulate_gradients, train
    from clearhead.training.lora import Lora, add_lora
    from clearhead.training.metrics import flops_per_token
    from clearhead.training.models import build_model_config
    from clearhead.training.optimizer import AdamW, Muon
    from clearhead.training.overrides import parse_overrides
    from clearhead.training.recipe import Recipe, ResolvedRecipe, read_recipe
    from clearhead.training.recipe_catalog import available_recipes, describe_recipe, find_recipe
    from clearhead.training.recipe_help import RecipeKey, recipe_keys
    from clearhead.training.result import TrainingResult
    from clearhead.training.schedule import Constant

_MODULES = {  # the module that defines each name
    "AdamW": "optimizer",
    "Constant": "schedule",
    "Learner": "learner",
    "Lora": "lora",
    "Muon": "optimizer",
    "Recipe": "recipe",
    "RecipeKey": "recipe_help",
    "ResolvedRecipe": "recipe",
    "TrainConfig": "config",
    "TrainingResult": "result",
    "World": "distributed",
    "accumulate_gradients": "loop",
    "add_lora": "lora",
    "available_recipes": "recipe_catalog",
    "build_model_config": "models",
    "describe_recipe": "recipe_catalog",
    "find_recipe": "recipe_catalog",
    "flops_per_token": "metrics",
    "is_main_process": "distributed",
    "parse_overrides": "overrides",
    "read_recipe": "recipe",
    "recipe_keys": "recipe_help",
    "reuse_freed_memory": "heap",
    "train": "loop",
}

__all__ = [
    "AdamW",
    "Constant",
    "Learner",
    "Lora",
    "Muon",
    "Recipe",
    "RecipeKey",
    "ResolvedRecipe",
    "TrainConfig",
    "TrainingResult",
    "World",
    "accumulate_gradients",
    "add_lora",
    "available_recipes",
    "build_model_config",
    "describe_recipe",
    "find_recipe",
    "flops_per_token",
    "is_main_process",
    "parse_overrides",
    "read_recipe",
    "recipe_keys",
    "reuse_freed_memory",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'clearhead.training' has no attribute {name!r}")
    return getattr(import_module(f"clearhead.training.{_MODULES[name]}"), name)
