"""Small recipes whose runs take about a second, with everything that a checkpoint has to restore.

recipes = write_recipes(Path("data"))     # name -> Recipe
"""

import json
from pathlib import Path
from typing import Any

from clearhead.api import Model
from clearhead.tokenization import byte_tokenizer
from clearhead.training import Recipe
from clearhead.training.recipe import resolve_recipe
from clearhead.training.setup import PAIR_SPECIAL_TOKENS
from tests.checkpoint.tiny import tiny_network
from tests.training.recipes import LANGUAGE_MODEL, SMALL, recipe

TEXT = "The keeper counts the lamps, writes the number down, and counts them again at dawn. " * 40


def write_recipes(folder: Path) -> dict[str, Recipe]:
    """Write the data of all recipes into a folder, and return the recipes by name."""
    folder.mkdir(parents=True, exist_ok=True)
    text, base = folder / "text.txt", folder / "base"
    text.write_text(TEXT, encoding="utf-8")
    if not base.exists():
        tokenizer = byte_tokenizer()
        Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(base)
    data = LANGUAGE_MODEL["data"] | {"path": str(text)}
    language_model = {"model": LANGUAGE_MODEL["model"], "data": data}
    loaded_model = {"model": {"kind": "loaded_model", "name": str(base)}, "data": data}
    return {
        "translator": recipe({"train": {"average": 0.9, "keep": "best"}}),
        "language model with workers": recipe(language_model, {"train": {"num_workers": 2, "accumulation": 2}}),
        "recurrent": recipe({"model": {"kind": "recurrent_model", "width": 16, "context": 32, "dropout": 0.1}}),
        "muon in bfloat16": recipe(language_model, {"train": {"optimizer": {"kind": "muon"}, "precision": "bfloat16"}}),
        "adapters": _recipe_of_loaded_model(loaded_model, {"lora": {"rank": 2, "dropout": 0.1}}),
        "preferences": _preference_recipe(folder),
    }


def _preference_recipe(folder: Path) -> Recipe:
    """Return a recipe that tunes a small chat model on preferences."""
    tokenizer = byte_tokenizer(PAIR_SPECIAL_TOKENS)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    if not (folder / "chat").exists():
        Model(tiny_network(vocab_size=tokenizer.vocab_size), tokenizer).save(folder / "chat")
    lines = [{"prompt": f"{number}?", "chosen": "Yes.", "rejected": f"No {number}!"} for number in range(40)]
    path = folder / "preferences.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {"kind": "loaded_model", "name": str(folder / "chat")}
    data = {"kind": "preference_data", "path": str(path), "context": 32}
    return _recipe_of_loaded_model({"model": model, "data": data, "dpo": {"beta": 0.2}})


def _recipe_of_loaded_model(*tables: dict[str, Any]) -> Recipe:
    """Return the recipe of a loaded model, which has its own tokenizer."""
    return resolve_recipe([("test", table) for table in ({"train": SMALL["train"]}, *tables)]).recipe
