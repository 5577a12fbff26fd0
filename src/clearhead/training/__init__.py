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

from typing import TYPE_CHECKING

from clearhead.lazy_imports import lazy_exports

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

__getattr__ = lazy_exports(
    __name__,
    {
        "config": ["TrainConfig"],
        "distributed": ["World", "is_main_process"],
        "heap": ["reuse_freed_memory"],
        "learner": ["Learner"],
        "loop": ["accumulate_gradients", "train"],
        "lora": ["Lora", "add_lora"],
        "metrics": ["flops_per_token"],
        "models": ["build_model_config"],
        "optimizer": ["AdamW", "Muon"],
        "overrides": ["parse_overrides"],
        "recipe": ["Recipe", "ResolvedRecipe", "read_recipe"],
        "recipe_catalog": ["available_recipes", "describe_recipe", "find_recipe"],
        "recipe_help": ["RecipeKey", "recipe_keys"],
        "result": ["TrainingResult"],
        "schedule": ["Constant"],
    },
)
