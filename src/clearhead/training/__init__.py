"""From a recipe to a trained model, in a folder that survives.

Start at `loop.py`: the one function that trains, read from top to bottom. What it calls, in this order: `recipe.py`
(a TOML file to what is trained on what), `beginning.py` (new or resumed), `schedule.py`, `objective.py` and `loss.py`
(a batch to its loss), `learner.py` (all that training changes),
`metrics.py` and `display.py` (what is written down and shown), `validate.py`, `runs.py` (checkpoints that survive a
kill), `ending.py` (model, picture, sample). `distributed.py` is the only file that knows of ranks.
"""

from clearhead.training.config import (
    TrainConfig,
)
from clearhead.training.distributed import (
    World,
    is_first_process,
)
from clearhead.training.learner import (
    Learner,
    keep_freed_memory,
)
from clearhead.training.loop import (
    accumulate,
    train,
)
from clearhead.training.metrics import (
    flops_per_token,
)
from clearhead.training.models import (
    model_config,
)
from clearhead.training.optimizer import (
    AdamW,
    Muon,
)
from clearhead.training.recipe import (
    read_recipe,
)
from clearhead.training.recipe_catalog import (
    heading,
    shelf,
)
from clearhead.training.schedule import (
    Constant,
)

__all__ = [
    "AdamW",
    "Constant",
    "Learner",
    "Muon",
    "TrainConfig",
    "World",
    "accumulate",
    "flops_per_token",
    "heading",
    "is_first_process",
    "keep_freed_memory",
    "model_config",
    "read_recipe",
    "shelf",
    "train",
]
