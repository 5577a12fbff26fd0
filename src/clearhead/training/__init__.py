"""Train models from recipes, in run folders that survive interruptions.

Start with `loop.py`, which contains the training loop. It uses, in this order:

    recipe, recipe_catalog    read a TOML file and overrides (models, config: its tables)
    start, setup              build tokenizer, data and network, or restore a checkpoint
    schedule                  the learning rate
    objective                 a batch to its loss (loss, head_loss, triton_loss, balance)
    distributed               several processes (tensor_parallel, tensor_slice)
    learner                   weights, optimizers and averages (optimizer, lora, heap)
    reporter                  log metrics (display, metrics)
    validation                the validation loss
    checkpoints               save and restore
    signals                   stop on SIGTERM and Ctrl-C
    finish                    save the model, samples and the loss curve (curve)
"""

from clearhead.training.config import TrainConfig
from clearhead.training.distributed import World, is_main_process
from clearhead.training.heap import reuse_freed_memory
from clearhead.training.learner import Learner
from clearhead.training.loop import accumulate_gradients, train
from clearhead.training.metrics import flops_per_token
from clearhead.training.models import build_model_config
from clearhead.training.optimizer import AdamW, Muon
from clearhead.training.recipe import read_recipe
from clearhead.training.recipe_catalog import available_recipes, describe_recipe
from clearhead.training.schedule import Constant

__all__ = [
    "AdamW",
    "Constant",
    "Learner",
    "Muon",
    "TrainConfig",
    "World",
    "accumulate_gradients",
    "available_recipes",
    "build_model_config",
    "describe_recipe",
    "flops_per_token",
    "is_main_process",
    "read_recipe",
    "reuse_freed_memory",
    "train",
]
