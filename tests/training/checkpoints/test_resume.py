"""Test restoring optimizers and random generators, stop signals, and bit-equal resumed runs."""

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
from clearhead.training.checkpoints import (
    RunFolder,
    capture_random_state,
    flatten_optimizer,
    restore_optimizer,
    restore_random_state,
    restore_weights,
)
from clearhead.training.loop import train
from clearhead.training.recipe import read_recipe
from clearhead.training.signals import StopSignals
from tests.training.faulty_disk import exit_code, fork_child

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
def test_a_restored_optimizer_continues_with_equal_steps(tmp_path, kind):
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    optimizer = OPTIMIZERS[kind](weights.values())
    for _ in range(3):
        take_step(network, optimizer)
    state = flatten_optimizer(optimizer, weights)
    RunFolder(tmp_path).save(3, {"weights": weights, "optimizer": state, "randomness": capture_random_state()}, {})
    take_step(network, optimizer)

    new_network = layers(seed=1)
    new_weights = dict(new_network.named_parameters())
    new_optimizer = OPTIMIZERS[kind](new_weights.values())
    saved = RunFolder(tmp_path).latest()
    restore_weights(new_weights, saved.tensors("weights", new_weights))
    restore_optimizer(new_optimizer, new_weights, saved.tensors("optimizer", new_weights))
    restore_random_state(saved.tensors("randomness"))
    take_step(new_network, new_optimizer)
    assert all(torch.equal(new_weights[name], weight) for name, weight in weights.items())
    torch.testing.assert_close(new_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_two_optimizers_share_one_group_of_tensors():
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    first, second = OPTIMIZERS["muon"]([weights["0.weight"]]), OPTIMIZERS["adamw"]([weights["2.weight"]])
    network(torch.rand(3, 4)).sum().backward()
    first.step()
    second.step()
    state = flatten_optimizer(first, weights) | flatten_optimizer(second, weights)
    assert set(state) == {"0.weight/momentum_buffer"} | {f"2.weight/{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    fresh = OPTIMIZERS["adamw"]([weights["2.weight"]])
    restore_optimizer(fresh, weights, state)
    torch.testing.assert_close(fresh.state_dict(), second.state_dict(), rtol=0, atol=0)


def test_state_of_another_model_is_rejected():
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    optimizer = OPTIMIZERS["adamw"](weights.values())
    take_step(network, optimizer)
    state = flatten_optimizer(optimizer, weights)
    with pytest.raises(ClearheadError, match=r"no optimizer state for '2.weight'"):
        restore_optimizer(optimizer, weights, {name: state[name] for name in state if name.startswith("0.")})
    with pytest.raises(ClearheadError, match=r"optimizer state for '9.weight'"):
        restore_optimizer(optimizer, weights, {"9.weight/step": torch.ones(())})
    with pytest.raises(ClearheadError, match=r"only the model has '0.weight'"):
        restore_weights(weights, {"2.weight": weights["2.weight"]})
    with pytest.raises(ClearheadError, match=r"only the checkpoint has '9.weight'"):
        restore_weights(weights, weights | {"9.weight": torch.ones(1)})
    with pytest.raises(
        ClearheadError, match=r"'0.weight' has shape \(2,\) in the checkpoint but \(6, 4\) in the model"
    ):
        restore_weights(weights, weights | {"0.weight": torch.ones(2)})


def draw_from_all_generators():
    return (
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    )


def test_every_restored_generator_continues_its_sequence(tmp_path):
    draw_from_all_generators()
    random.gauss(0, 1)  # Gaussian generators compute two numbers and store the second
    RunFolder(tmp_path).save(1, {"randomness": capture_random_state()}, {})
    expected = draw_from_all_generators()
    assert draw_from_all_generators() != expected
    restore_random_state(RunFolder(tmp_path).latest().tensors("randomness"))
    assert draw_from_all_generators() == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_one_signal_requests_a_stop_and_a_second_one_ends_the_process(number, code):
    def signal_once():
        with StopSignals() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested
            return stop.exit_code

    def signal_twice():
        signal.signal(number, signal.SIG_DFL)
        with StopSignals():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            time.sleep(10)

    previous = signal.getsignal(number)
    assert exit_code(fork_child(signal_once)) == code
    assert exit_code(fork_child(signal_twice)) == -number
    with StopSignals():
        pass
    assert signal.getsignal(number) is previous


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
    random.seed(0)  # training uses torch only, but a checkpoint contains these two generators as well
    np.random.seed(0)
    train(read_recipe(recipe).recipe, folder)
    return 0


def wait_for_step(folder, step, child):
    """Wait until the run in a child process has saved this step or a later one."""
    while not any(int(path.name.removeprefix("step-")) >= step for path in RunFolder(folder).checkpoint_folders()):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended too early"
        time.sleep(0.002)


def test_a_run_that_was_killed_three_times_is_bit_equal_to_one_that_was_not(tmp_path):
    """With epochs of five steps, two parts per step and a save every three steps, the kills come at any point."""
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    assert exit_code(fork_child(lambda: run_recipe(uninterrupted))) == 0
    for until in (3, 9, 18):
        child = fork_child(lambda: run_recipe(killed))
        wait_for_step(killed, until, child)
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
    assert exit_code(fork_child(lambda: run_recipe(killed))) == 0
    expected, found = (RunFolder(folder).latest().folder for folder in (uninterrupted, killed))
    assert expected.name == found.name == "step-00000030"
    assert (expected / "manifest.json").read_text() == (found / "manifest.json").read_text()
    assert losses(uninterrupted) == losses(killed)
    final = [
        safetensors.torch.load_file(folder / "model" / "weights.safetensors") for folder in (uninterrupted, killed)
    ]
    assert all(torch.equal(tensor, final[1][name]) for name, tensor in final[0].items())


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert [step for step, _ in steps] == list(range(1, 31))
    return steps


def test_sigterm_saves_and_the_run_resumes_from_there(tmp_path):
    child = fork_child(lambda: run_recipe(tmp_path / "run"))
    wait_for_step(tmp_path / "run", 3, child)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == 143
    saved = RunFolder(tmp_path / "run").latest()
    assert 3 <= saved.step < 30
    assert exit_code(fork_child(lambda: run_recipe(tmp_path / "run"))) == 0
    losses(tmp_path / "run")


def damaged_states():
    state = capture_random_state()
    words = state["python"]
    return {
        "torch is missing": ({name: tensor for name, tensor in state.items() if name != "torch"}, "has no 'torch'"),
        "torch is cut": (state | {"torch": state["torch"][:100]}, "of torch is damaged"),
        "torch has another type": (state | {"torch": state["torch"].float()}, "of torch is damaged"),
        "python is cut": (state | {"python": words[:10]}, "of python is damaged"),
        "python is negative": (state | {"python": -words}, "of python is damaged"),
        "python position": (state | {"python": torch.cat([words[:-1], torch.tensor([10**6])])}, "of python is damaged"),
        "numpy is too large": (state | {"numpy": words * 0 + 2**40}, "of numpy is damaged"),
        "numpy has another type": (state | {"numpy": words.double()}, "of numpy is damaged"),
        "gauss": (state | {"numpy_gauss": torch.zeros(7, dtype=torch.float64)}, "damaged 'numpy_gauss'"),
    }


@pytest.mark.parametrize("damage", damaged_states())
def test_a_damaged_random_state_is_rejected_and_changes_no_generator(damage):
    state, message = damaged_states()[damage]
    before = random.getstate()
    with pytest.raises(ClearheadError, match=message):
        restore_random_state(state)
    assert random.getstate() == before


def test_a_run_with_a_damaged_random_state_names_the_checkpoint_to_delete(tmp_path, monkeypatch):
    recipe = read_recipe("capitals", ["--train.steps", "2", "--train.device", "cpu"], smoke=True).recipe
    with monkeypatch.context() as patch:
        patch.setattr("clearhead.training.learner.capture_random_state", lambda: {"torch": torch.zeros(3)})
        train(recipe, tmp_path)
    with pytest.raises(ClearheadError, match=r"step-00000002 cannot be resumed: .*; delete it to resume from"):
        train(recipe, tmp_path)


@pytest.mark.parametrize("state", [{}, [], {"recipe": 3}])
def test_a_state_without_its_tables_is_rejected(tmp_path, state):
    saved = RunFolder(tmp_path)
    saved.save(1, {"weights": {"a": torch.zeros(1)}}, state)
    with pytest.raises(ClearheadError, match=r"state\.json is damaged"):
        saved.latest().state_table("recipe")


def test_an_optimizer_state_of_another_shape_is_rejected():
    network = layers(seed=0)
    weights = dict(network.named_parameters())
    optimizer = torch.optim.AdamW(weights.values())
    take_step(network, optimizer)
    state = flatten_optimizer(optimizer, weights)
    name = next(name for name in state if name.endswith("exp_avg"))
    with pytest.raises(ClearheadError, match=r"exp_avg' has shape \(5,\), but its weight has shape"):
        restore_optimizer(optimizer, weights, state | {name: torch.zeros(5)})
