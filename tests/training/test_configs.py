"""Every recipe of the project runs as a smoke, through the command line, and leaves a model that speaks."""

import subprocess
import sys

import pytest

from clearhead.api import load
from clearhead.cli import main
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from tests.training.recipes import quiet

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
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no data are
    train(read_recipe(name, ["--train.device", "cpu"], smoke=True).recipe, tmp_path, quiet())
    assert (tmp_path / "sample.txt").read_text().strip()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load(tmp_path / "model").tokenizer is not None


def test_from_the_command_line_to_a_text(tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The same thing again and again. " * 100)
    data = ("--data.kind", "text_data", "--data.path", text, "--data.context", "64")
    done = clearhead("train", "shakespeare-cpu", "--out", run, "--smoke", "--train.steps", "3", *data)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run / "model")
    shown = [line.split(maxsplit=2) for line in done.stderr.splitlines()]
    assert ["train.batch_size", "12", "(recipe)"] in shown
    assert ["train.schedule.warmup_steps", "2", "(smoke)"] in shown
    assert ["train.steps", "3", "(command line)"] in shown
    assert (done.stdout + done.stderr).count(str(run / "model")) == 1
    said = clearhead("generate", run / "model", "The ", "--max-new-tokens", "5")
    assert said.returncode == 0, said.stderr
    assert len(said.stdout) > 1


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_gguf")
def test_fine_tuning_smollm2(tmp_path):
    done = clearhead("train", "finetune-lora", "--out", tmp_path, "--smoke", "--train.device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "weights.safetensors").exists()


def test_a_wrong_key_is_one_sentence(tmp_path):
    done = clearhead("train", "capitals", "--out", tmp_path / "run", "--train.stpes", "3")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: unknown key in recipe.train: 'stpes'; did you mean 'steps'?"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--data.kind", "text_data", "--data.path", "nowhere.txt", "--data.context", "8"),
            "nowhere.txt does not exist",
        ),
        (("--train.schedule.warmup_steps", "900"), "train.schedule.warmup_steps 900"),
    ],
)
def test_a_refused_run_is_one_sentence_and_leaves_nothing(tmp_path, arguments, sentence):
    done = clearhead("train", "capitals", "--smoke", "--out", tmp_path / "run", *arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
    assert not (tmp_path / "run").exists()


def test_of_several_processes_one_speaks(tmp_path, monkeypatch, capfd):
    """As the second of torchrun's, which trains and leaves the talking to the first."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["clearhead", "train", "capitals", "--smoke", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    assert capfd.readouterr().out == ""
    assert (tmp_path / "model").is_dir()
