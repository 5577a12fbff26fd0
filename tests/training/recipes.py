"""Provide recipes that train for a second or two.

run(tmp_path, {"train": {"steps": 20}})
"""

from io import StringIO
from typing import Any

from rich.console import Console

from clearhead.training.loop import TrainingResult, train
from clearhead.training.recipe import Recipe, resolve_recipe

SMALL = {
    "model": {
        "kind": "translator_model",
        "width": 16,
        "num_layers": 1,
        "num_heads": 2,
        "feed_forward": 32,
        "context": 32,
        "dropout": 0.1,
    },
    "tokenizer": {"kind": "character_tokenizer"},
    "data": {"kind": "synthetic_data", "task": "copy", "max_length": 8, "num_examples": 64, "num_validation": 16},
    "train": {"steps": 12, "batch_size": 8, "validate_every": 6, "save_every": 3, "log_every": 1, "device": "cpu"},
}
SMALL["data"]["context"] = 32
LANGUAGE_MODEL = {
    "model": {"kind": "decoder_model", "width": 16, "num_layers": 1, "num_heads": 2, "context": 32},
    "data": {"kind": "text_data", "context": 16},
}


def recipe(*layers: dict[str, Any]) -> Recipe:
    """Return the small translator's recipe with these changes."""
    return resolve_recipe([("test", layer) for layer in (SMALL, *layers)]).recipe


def run(folder: Any, *layers: dict[str, Any]) -> TrainingResult:
    """Train that recipe without output."""
    return train(recipe(*layers), folder, quiet_console())


def quiet_console() -> Console:
    """Return a console that prints into a string."""
    return Console(file=StringIO(), width=120)
