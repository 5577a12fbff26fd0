"""Save over a model again and again in processes that are killed at random moments.

    python -m tests.checkpoint.interrupted_saves KIND FOLDER NUM_KILLS   # prints a JSON object with what was found

KIND is native, huggingface, shards, renames (a file system that cannot exchange two names) or in-place (the folder is
the working directory, so it cannot be replaced). The two models that are saved in turn differ in config, weights,
special ids and tokenizer. After each kill the folder must load as one of them; only in place may it be rejected as
incomplete.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

import clearhead.api.model
from clearhead.api import Model, load
from clearhead.checkpoint import replacement
from clearhead.checkpoint.huggingface import save_folder
from clearhead.errors import ClearheadError
from clearhead.families import family_of_type
from clearhead.tokenization.characters import character_tokenizer
from tests.checkpoint.tiny import tiny_network

FOREIGN_FILES = {"README.md": "Keep me.", "notes/a/b.txt": "Keep me too."}
MAX_SAVES = 2.5  # kill within the duration of so many saves


def make_model(number: int) -> Model:
    """Return model 0 or 1; all its weights are about its number."""
    network = tiny_network(seed=number, context=64 + number)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1 + number)
    tokenizer = character_tokenizer("ab" if number else "cd")
    return Model(network, tokenizer, family_of_type("llama"), {"eos_token_id": number})


def identify(model: Model) -> str:
    """Return "0" or "1", or what is mixed."""
    tokenizer_number = int("a" in model.tokenizer.decode(list(range(model.tokenizer.vocab_size))))
    numbers = {
        "config": model.config.context - 64,
        "weights": sorted({int(value) - 1 for weight in model.network.parameters() for value in weight.unique()}),
        "special_ids": model.special_ids["eos_token_id"],
        "tokenizer": tokenizer_number,
    }
    for number in (0, 1):
        if numbers == {"config": number, "weights": [number], "special_ids": number, "tokenizer": number}:
            return str(number)
    return f"mixed: {numbers}"


def save_until_killed(models: list[Model], folder: Path, format: str, first: int) -> None:
    """Save the models in turn, forever."""
    try:
        for number in range(first, 10**9):
            models[number % 2].save(folder, format)
    finally:
        os._exit(1)


def try_to_load(folder: Path) -> str:
    try:
        return identify(load(folder, fast=False))
    except ClearheadError as error:
        return f"refused: {error}"


def main(kind: str, folder: Path, num_kills: int) -> None:
    torch.set_num_threads(1)  # a forked process has no other threads
    if kind == "shards":
        clearhead.api.model.save_folder = partial(save_folder, shard_bytes=4000)
    if kind == "renames":
        replacement._exchange = lambda one, other: False
    format = "native" if kind == "native" else "huggingface"
    models, chance, found = [make_model(0), make_model(1)], random.Random(kind), Counter()
    models[0].save(folder, format)
    started = time.perf_counter()
    models[0].save(folder, format)
    max_seconds = MAX_SAVES * (time.perf_counter() - started)
    for name, text in FOREIGN_FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if kind == "in-place":
        os.chdir(folder)
    last = "0"
    for _ in range(num_kills):
        child = os.fork()
        if child == 0:
            save_until_killed(models, folder, format, first=int(last == "0"))
        time.sleep(chance.uniform(0, max_seconds))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "a save failed before it was killed"
        last = try_to_load(folder)
        found[last] += 1
        assert all((folder / name).read_text() == text for name, text in FOREIGN_FILES.items())
    models[1].save(folder, format)
    files = sorted(str(path.relative_to(folder.parent)) for path in folder.parent.rglob("*") if path.is_file())
    print(json.dumps({"found": found, "end": try_to_load(folder), "files": files}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
