"""Test that a recipe gives the same losses and the same model in one process and in several."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from rich.console import Console

from clearhead.training.checkpoints import RunFolder
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from tests.training.processes import run_in_processes

RECIPE = """
[model]
kind = "translator_model"
width = 16
num_layers = 1
num_heads = 2
feed_forward = 32
context = 16

[tokenizer]
kind = "character_tokenizer"

[data]
kind = "synthetic_data"
task = "copy"
num_examples = 40
num_validation = 8
context = 16

[train]
steps = 6
batch_size = 8
accumulation = 2
log_every = 1
save_every = 3
validate_every = 3
device = "cpu"

[train.schedule]
kind = "constant"
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def run(recipe, folder, *changes):
    with folder.with_suffix(".log").open("a") as log:
        train(read_recipe(recipe, list(changes)).recipe, folder, Console(file=log))


def assert_same_run(found, expected):
    """Compare with a tolerance for sums in another order in float32."""
    rows = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (found, expected)
    ]
    for key in ("loss", "gradient_norm", "validation_loss"):
        values = [[row[key] for row in run_rows if key in row] for run_rows in rows]
        assert values[0] == pytest.approx(values[1], rel=1e-5)
    weights = [safetensors.torch.load_file(folder / "model" / "weights.safetensors") for folder in (found, expected)]
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[0][name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_two_processes_train_a_recipe_like_one(tmp_path, recipe, kind):
    run(recipe, tmp_path / "one")
    run_in_processes(2, lambda: run(recipe, tmp_path / "two", "--train.strategy", kind))
    assert_same_run(tmp_path / "two", tmp_path / "one")


def test_one_process_finishes_an_fsdp_run_of_four(tmp_path, recipe):
    run(recipe, tmp_path / "straight")
    run_in_processes(4, lambda: run(recipe, tmp_path / "run", "--train.strategy", "fsdp", "--train.steps", "3"))
    assert RunFolder(tmp_path / "run").latest().num_data_ranks == 4
    run(recipe, tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_torchrun_trains_a_recipe(tmp_path, recipe):
    run(recipe, tmp_path / "one")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "clearhead", "train", str(recipe), "--out", str(tmp_path / "two"), "--train.strategy", "fsdp"]
    subprocess.run(torchrun + command, check=True, timeout=300)
    assert_same_run(tmp_path / "two", tmp_path / "one")
