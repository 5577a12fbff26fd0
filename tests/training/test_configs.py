"""Test that every recipe in configs/ runs with --smoke and leaves a model that generates."""

import json
import shlex
import sys

import pytest

from clearhead.api import load
from clearhead.cli import main
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from tests.forked_command import run_forked as run_clearhead
from tests.training.recipes import quiet_console

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


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_with_smoke(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without the data files of the recipes
    train(read_recipe(name, ["--train.device", "cpu"], smoke=True).recipe, tmp_path, quiet_console())
    assert (tmp_path / "sample.txt").read_text().strip()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert load(tmp_path / "model").tokenizer is not None


def test_the_command_line_trains_and_the_model_generates(tmp_path):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("The same thing again and again. " * 100)
    data = ("--data.kind", "text_data", "--data.path", text, "--data.context", "64")
    done = run_clearhead("train", "shakespeare-cpu", "--out", run, "--smoke", "--train.steps", "3", *data)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(run / "model")
    shown = done.stderr.splitlines()
    assert len(shown) < 20
    assert shown[0].startswith("model  decoder_model: ")
    assert any(line.startswith("changed") and "train.steps 3" in line for line in shown)
    assert any(line.startswith("finished 3 steps: loss ") for line in shown)
    command = next(line for line in shown if line.startswith(f"  clearhead generate {run / 'model'} "))
    trace = next(line for line in shown if line.startswith(f"  clearhead trace {run / 'model'} "))
    for printed in (command, trace):
        done = run_clearhead(*shlex.split(printed)[1:])
        assert done.returncode == 0, done.stderr
    generated = run_clearhead("generate", run / "model", "The ", "--max-new-tokens", "5")
    assert generated.returncode == 0, generated.stderr
    assert len(generated.stdout) > 1


def test_print_config_prints_every_value_with_its_origin_and_does_not_train(tmp_path):
    done = run_clearhead("train", "shakespeare-cpu", "--print-config", "--smoke", "--train.steps", "3")
    shown = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert ["train.batch_size", "12", "(recipe)"] in shown
    assert ["train.schedule.warmup_steps", "2", "(smoke)"] in shown
    assert ["train.steps", "3", "(command line)"] in shown
    as_json = json.loads(run_clearhead("train", "shakespeare-cpu", "--print-config", "--json").stdout)
    assert as_json["recipe"]["train"]["steps"] == 2000
    assert as_json["origins"]["train.clip"] == "default"


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_gguf")
def test_finetune_lora_runs_with_smoke(tmp_path):
    done = run_clearhead("train", "finetune-lora", "--out", tmp_path, "--smoke", "--train.device", "cpu")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model" / "weights.safetensors").exists()


def test_a_misspelled_key_gives_a_one_line_error_and_no_folder(tmp_path):
    done = run_clearhead("train", "capitals", "--out", tmp_path / "run", "--train.stpes", "3")
    assert done.returncode == 1
    assert done.stderr.strip() == "error: unknown key --train.stpes; did you mean --train.steps?"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("-5", "error: --train.steps is -5; it must be a whole number, 1 or more"),
        ("ten", "error: --train.steps is 'ten'; it must be a whole number"),
    ],
)
def test_a_wrong_value_is_reported_with_the_key_as_it_was_given(value, sentence):
    done = run_clearhead("train", "capitals", "--print-config", "--train.steps", value)
    assert (done.returncode, done.stderr.strip()) == (1, sentence)


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
def test_a_rejected_run_gives_a_one_line_error_and_no_folder(tmp_path, arguments, sentence):
    done = run_clearhead("train", "capitals", "--smoke", "--out", tmp_path / "run", *arguments)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr
    assert not (tmp_path / "run").exists()


def test_only_the_main_process_prints(tmp_path, monkeypatch, capfd):
    """The second of torchrun's processes trains but prints nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["clearhead", "train", "capitals", "--smoke", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert not exit_info.value.code
    assert capfd.readouterr().out == ""
    assert (tmp_path / "model").is_dir()
