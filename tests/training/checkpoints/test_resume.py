"""What a run remembers: optimizers, randomness, signals; and that a run cut short ends as one that was not."""

import json
import os
import random
import signal
import time

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from clearhead.errors import ClearheadError
from clearhead.training.checkpoints.run_folder import RunFolder
from clearhead.training.checkpoints.state import (
    capture_randomness,
    flatten_optimizer,
    restore_optimizer,
    restore_randomness,
    restore_weights,
)
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from clearhead.training.signals import Stopper
from tests.training.faults import exit_code, in_child

OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "adamw fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "muon": lambda weights: torch.optim.Muon(weights, lr=0.1),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
}


def layers(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Dropout(0.5), nn.Linear(6, 2, bias=False))


def take_step(network, optimizer):
    network(torch.rand(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_nothing_had_been(tmp_path, kind):
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    optimizer = OPTIMIZERS[kind](weights.values())
    for _ in range(3):
        take_step(network, optimizer)
    flat = flatten_optimizer(optimizer, weights)
    RunFolder(tmp_path).save(3, {"weights": weights, "optimizer": flat, "randomness": capture_randomness()}, {})
    take_step(network, optimizer)

    again = layers(seed=1)
    own = dict(again.named_parameters())
    resumed = OPTIMIZERS[kind](own.values())
    saved = RunFolder(tmp_path).latest()
    restore_weights(own, saved.tensors("weights", own))
    restore_optimizer(resumed, own, saved.tensors("optimizer", own))
    restore_randomness(saved.tensors("randomness"))
    take_step(again, resumed)
    assert all(torch.equal(own[name], weight) for name, weight in weights.items())
    torch.testing.assert_close(resumed.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_two_optimizers_share_a_file():
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    first, second = OPTIMIZERS["muon"]([weights["0.weight"]]), OPTIMIZERS["adamw"]([weights["2.weight"]])
    network(torch.rand(3, 4)).sum().backward()
    first.step()
    second.step()
    flat = flatten_optimizer(first, weights) | flatten_optimizer(second, weights)
    assert set(flat) == {"0.weight/momentum_buffer"} | {f"2.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    fresh = OPTIMIZERS["adamw"]([weights["2.weight"]])
    restore_optimizer(fresh, weights, flat)
    torch.testing.assert_close(fresh.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_state_of_another_model_is_refused():
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    optimizer = OPTIMIZERS["adamw"](weights.values())
    take_step(network, optimizer)
    flat = flatten_optimizer(optimizer, weights)
    with pytest.raises(ClearheadError, match=r"no optimizer state for '2.weight'"):
        restore_optimizer(optimizer, weights, {name: flat[name] for name in flat if name.startswith("0.")})
    with pytest.raises(ClearheadError, match=r"optimizer state for '9.weight'"):
        restore_optimizer(optimizer, weights, {"9.weight/step": torch.ones(())})
    with pytest.raises(ClearheadError, match=r"only the model has '0.weight'"):
        restore_weights(weights, {"2.weight": weights["2.weight"]})
    with pytest.raises(ClearheadError, match=r"only the checkpoint has '9.weight'"):
        restore_weights(weights, weights | {"9.weight": torch.ones(1)})
    with pytest.raises(ClearheadError, match=r"'0.weight' is \(2,\), the model has \(6, 4\)"):
        restore_weights(weights, weights | {"0.weight": torch.ones(2)})


def draws():
    return (
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    )


def test_every_generator_draws_on_where_it_was(tmp_path):
    draws()
    random.gauss(0, 1)  # each of the two makes numbers in pairs and keeps the second
    RunFolder(tmp_path).save(1, {"randomness": capture_randomness()}, {})
    expected = draws()
    assert draws() != expected
    restore_randomness(RunFolder(tmp_path).latest().tensors("randomness"))
    assert draws() == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_asks_and_a_second_one_ends(number, code):
    def asked_once():
        with Stopper() as stop:
            assert not stop.asked
            os.kill(os.getpid(), number)
            assert stop.asked
            return stop.exit_code

    def asked_twice():
        signal.signal(number, signal.SIG_DFL)
        with Stopper():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            time.sleep(10)

    former = signal.getsignal(number)
    assert exit_code(in_child(asked_once)) == code
    assert exit_code(in_child(asked_twice)) == -number
    with Stopper():
        pass
    assert signal.getsignal(number) is former


RECIPE = """
[model]
kind = "translator_model"
width = 16
num_layers = 1
num_heads = 2
feed_forward = 32
context = 64
dropout = 0.1

[tokenizer]
kind = "character_tokenizer"

[data]
kind = "synthetic_data"
task = "capitals"
max_length = 12
num_examples = 40
num_validation = 8
context = 16

[train]
steps = 30
batch_size = 8
accumulation = 2
log_every = 1
save_every = 3
validate_every = 10
device = "cpu"
"""


def run_recipe(folder):
    recipe = folder.parent / "recipe.toml"
    recipe.write_text(RECIPE)
    random.seed(0)  # training draws from torch alone, but a checkpoint holds the state of these two as well
    np.random.seed(0)
    train(read_recipe(recipe).recipe, folder)
    return 0


def await_step(folder, step, child):
    """Until the run in this child has saved this step or a later one."""
    while not any(int(path.name.removeprefix("step-")) >= step for path in RunFolder(folder).steps()):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended before"
        time.sleep(0.002)


def test_a_run_killed_three_times_ends_bitwise_as_one_that_was_not(tmp_path):
    """Epochs of five steps, two parts for each update, a save each third step: kills fall anywhere between."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert exit_code(in_child(lambda: run_recipe(straight))) == 0
    for until in (3, 9, 18):
        child = in_child(lambda: run_recipe(killed))
        await_step(killed, until, child)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
    assert exit_code(in_child(lambda: run_recipe(killed))) == 0
    one, other = (RunFolder(folder).latest().folder for folder in (straight, killed))
    assert one.name == other.name == "step-00000030"
    assert (one / "manifest.json").read_text() == (other / "manifest.json").read_text()
    assert losses(straight) == losses(killed)
    final = [safetensors.torch.load_file(folder / "model" / "weights.safetensors") for folder in (straight, killed)]
    assert all(torch.equal(tensor, final[1][name]) for name, tensor in final[0].items())


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert [step for step, _ in found] == list(range(1, 31))
    return found


def test_sigterm_saves_and_the_run_goes_on_from_there(tmp_path):
    child = in_child(lambda: run_recipe(tmp_path / "run"))
    await_step(tmp_path / "run", 3, child)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == 143
    saved = RunFolder(tmp_path / "run").latest()
    assert 3 <= saved.step < 30
    assert exit_code(in_child(lambda: run_recipe(tmp_path / "run"))) == 0
    losses(tmp_path / "run")
