"""Every recipe of the project runs as a smoke, through the command line, and leaves a model that speaks."""

import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.bundle import load
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from tests.training.recipes import quiet

PROJECT = Path(__file__).parents[2]
NAMES = (
    "books",
    "capitals",
    "g2p",
    "g2p-cpu",
    "gpt2-124m",
    "llama-1b",
    "multi30k-tiny",
    "shakespeare-char",
    "shakespeare-cpu",
)


def clearhead(*arguments):
    command = [sys.executable, "-m", "clearhead", *map(str, arguments)]
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    resolved = read_recipe(f"configs/{name}.toml", ["--train.device", "cpu"], smoke=True)
    train(resolved.recipe, tmp_path, quiet())
    assert (tmp_path / "sample.txt").read_text().strip()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load(tmp_path / "model").tokenizer is not None


def test_from_the_command_line_to_a_text(tmp_path):
    done = clearhead("train", "configs/shakespeare-cpu.toml", "--out", tmp_path, "--smoke", "--train.steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "model")
    shown = [line.split(maxsplit=2) for line in done.stderr.splitlines()]
    assert ["train.batch_size", "12", "(recipe)"] in shown
    assert ["train.schedule.warmup_steps", "2", "(smoke)"] in shown
    assert ["train.steps", "3", "(command line)"] in shown
    said = clearhead("generate", tmp_path / "model", "The ", "--max-new-tokens", "5")
    assert said.returncode == 0, said.stderr
    assert len(said.stdout) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_gguf")
def test_fine_tuning_smollm2(tmp_path):
    done = clearhead("train", "configs/finetune-lora.toml", "--out", tmp_path, "--smoke", "--train.device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "weights.safetensors").exists()


def test_a_wrong_key_is_one_sentence(tmp_path):
    done = clearhead("train", "configs/capitals.toml", "--out", tmp_path / "run", "--train.stpes", "3")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: unknown key in recipe.train: 'stpes'; did you mean 'steps'?"
    assert not (tmp_path / "run").exists()
