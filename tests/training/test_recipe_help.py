"""Test the list of a recipe's keys, which `clearhead train RECIPE --help` prints."""

import subprocess
import sys
from dataclasses import fields

from clearhead.training import read_recipe
from clearhead.training.config import TrainConfig
from clearhead.training.overrides import flatten
from clearhead.training.recipe_help import recipe_keys
from tests.forked_command import run_forked


def test_every_value_of_a_recipe_is_listed_with_type_value_origin_and_meaning():
    resolved = read_recipe("shakespeare-cpu", ["--train.steps", "5"])
    keys = {key.name: key for key in recipe_keys(resolved)}
    assert set(flatten_names(resolved)) <= set(keys)
    assert {f"train.{item.name}" for item in fields(TrainConfig)} - set(keys) == {
        "train.optimizer",
        "train.schedule",
        "train.balance",
    }
    clip = keys["train.clip"]
    assert (clip.type, clip.value, clip.origin) == ("float", "1.0", "default")
    assert clip.about == "maximum norm of the gradient over all weights; 0: do not clip"
    assert keys["train.steps"].origin == "command line"
    assert keys["train.strategy"].type == "ddp | fsdp | tp"
    assert keys["train.samples"].type == "list of str"
    assert keys["data.validation_path"].value == "none"
    assert keys["train.balance.kind"].type == "balance_loss | balance_bias"
    assert (keys["lora.rank"].type, keys["lora.rank"].value) == ("int", "none")
    assert keys["data.unit"].about.startswith("what counts as one document")


def flatten_names(resolved):
    from clearhead.config import to_dict

    return flatten(to_dict(resolved.recipe))


def test_help_after_a_recipe_lists_its_keys():
    done = run_forked("train", "capitals", "--help")
    assert done.returncode == 0
    assert "--print-config" in done.stdout
    assert "--train.schedule.warmup_steps" in done.stdout
    assert "float: maximum norm" in done.stdout


def test_help_without_a_recipe_needs_no_torch():
    code = (
        "import sys; from clearhead.cli import main; sys.argv = ['clearhead', 'train', '--help']\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--out" in done.stdout


def test_an_unknown_recipe_is_rejected_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from clearhead.cli import main\n"
        f"sys.argv = ['clearhead', 'train', 'capitls', '--out', {str(tmp_path)!r}]\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("did you mean 'capitals'?")
