"""The fused head against autograd through the plain one: on a GPU where there is one, by Triton's interpreter else."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from clearhead.architecture.config import Head
from clearhead.data.batch import IGNORED, Batch
from clearhead.training.config import TrainConfig
from clearhead.training.objective import build_objective
from tests.model.toys import VOCAB, decoder, some_tokens, toy

pytest.importorskip("triton", reason="Triton is not installed")
from clearhead.backends.cuda import launch
from clearhead.training import head_loss as fused
from clearhead.training.head_loss import head_loss, suits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_LOGITS = 150
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", 64)  # of which three make a row


def draw(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    parts = [torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_() for shape in ((3, 7, 16), (150, 16), 150)]
    targets = torch.randint(0, NUM_LOGITS, (3, 7), device=DEVICE)
    targets[0, 3:5] = targets[2] = IGNORED
    return (parts if bias else [*parts[:2], None]), targets


def expected(parts, targets, smoothing, z_weight):
    """By torch's own loss, in the numbers that the product gives."""
    logits = functional.linear(*parts).flatten(0, 1).float()
    asked = targets.flatten() != IGNORED
    total = functional.cross_entropy(
        logits[asked], targets.flatten()[asked], reduction="sum", label_smoothing=smoothing
    )
    return total + z_weight * logits[asked].logsumexp(-1).square().sum()


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize(("smoothing", "z_weight"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_autograds(dtype, bias, smoothing, z_weight, chunk_tokens):
    parts, targets = draw(dtype, bias)
    given = [part for part in parts if part is not None]
    total = expected(parts, targets, smoothing, z_weight)
    losses = head_loss(*parts, targets, smoothing, z_weight, chunk_tokens)
    torch.testing.assert_close(losses.total, total)
    torch.testing.assert_close(losses.cross_entropy, expected(parts, targets, 0.0, 0.0).detach())
    gradients = torch.autograd.grad(losses.total / 12, given)
    for found, wanted in zip(gradients, torch.autograd.grad(total / 12, given), strict=True):
        assert found.dtype == dtype
        assert (found - wanted).norm() / wanted.norm() < (1e-6 if dtype == torch.float32 else 0.01)


def test_the_factor_is_not_rounded_to_bfloat16():
    parts, targets = draw(torch.bfloat16, bias=False)
    factor = 1.41015625  # half way between two numbers of bfloat16
    whole, scaled = (
        torch.autograd.grad(head_loss(*parts, targets).total * times, parts[1])[0].double() for times in (1.0, factor)
    )
    assert abs((scaled.norm() / whole.norm()).item() / factor - 1) < 1e-3  # 2.8e-3 if it were


def test_large_logits_do_not_overflow():
    parts, targets = draw(bias=False)
    with torch.no_grad():
        parts[0].mul_(1e3)
    losses = head_loss(*parts, targets)
    torch.testing.assert_close(losses.total, expected(parts, targets, 0.0, 0.0))
    assert all(part.isfinite().all() for part in torch.autograd.grad(losses.total, parts[:2]))


def test_logits_that_a_bias_rules_out():
    (hidden, matrix, bias), targets = draw()
    with torch.no_grad():
        bias[:100] = -torch.inf  # the first of three blocks is nothing else
    parts, targets = (hidden, matrix, bias), targets.clamp(min=100)
    total, wanted = head_loss(*parts, targets).total, expected(parts, targets, 0.0, 0.0)
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(torch.autograd.grad(total, parts), torch.autograd.grad(wanted, parts))


def test_targets_with_gaps_between_them():
    (hidden, *head), targets = draw()
    hidden, column = hidden[:, 1:2], targets[:, 1:2]
    torch.testing.assert_close(head_loss(hidden, *head, column).total, expected([hidden, *head], column, 0.0, 0.0))


def test_a_bias_is_trained_though_its_matrix_is_frozen():
    (hidden, matrix, bias), targets = draw()
    parts = hidden.detach(), matrix.detach(), bias
    (wanted,) = torch.autograd.grad(expected(parts, targets, 0.0, 0.0), bias)
    torch.testing.assert_close(torch.autograd.grad(head_loss(*parts, targets).total, bias), (wanted,))


def test_what_is_frozen_gets_no_gradient():
    (hidden, matrix, bias), targets = draw()
    head_loss(hidden, matrix.detach(), bias.detach(), targets).total.backward()
    frozen = hidden.grad.clone()
    head_loss(hidden.detach(), matrix, bias, targets).total.backward()
    torch.testing.assert_close(hidden.grad, frozen)
    assert matrix.grad is not None
    with torch.no_grad():
        assert not head_loss(hidden, matrix, bias, targets).total.requires_grad


def test_the_operation_keeps_its_promises_to_pytorch():
    (hidden, matrix, bias), targets = draw()
    hidden = hidden.detach().flatten(0, 1).requires_grad_()
    arguments = (hidden, matrix, bias, targets.flatten(), 0.1, 0.0, 21, True, True)
    torch.library.opcheck(fused.lose, arguments)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", [Head(), Head(tied=False, bias=True), Head(scale=0.5)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_training_learns_the_same(head, precision, chunk_tokens, monkeypatch):
    batch = Batch(tokens=some_tokens().to(DEVICE), targets=some_tokens(seed=2).to(DEVICE))
    found = []
    for fuses in (True, False):
        network = toy(replace(decoder(), head=head), torch.float32).to(DEVICE)
        config = TrainConfig(steps=1, batch_size=2, precision=precision, chunk_tokens=chunk_tokens)
        monkeypatch.setattr("clearhead.training.objective.suits", lambda network, fuses=fuses: fuses)
        losses = build_objective(network, config)(batch)
        losses.total.backward()
        found.append((losses.total.detach(), {name: weight.grad for name, weight in network.named_parameters()}))
    scale = 1e-6 if precision == "float32" else 0.01
    torch.testing.assert_close(found[0], found[1], rtol=scale, atol=20 * scale)


@pytest.mark.parametrize("head", [Head(softcap=30.0), None], ids=str)
def test_other_heads_are_left_to_autograd(head, monkeypatch):
    monkeypatch.setattr(fused, "triton_runs", lambda device: True)
    assert suits(toy(decoder(), torch.float32))
    assert not suits(toy(decoder(), torch.float64))
    assert not suits(toy(replace(decoder(), head=head), torch.float32))


def test_a_machine_on_which_triton_does_not_run(monkeypatch):
    network = toy(decoder(), torch.float32)
    assert not suits(network)  # on a processor
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert launch.triton_runs(torch.device("cuda", 1))
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    assert not launch.triton_runs(torch.device("cuda", 2))
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (6, 1))
    assert not launch.triton_runs(torch.device("cuda", 3))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not launch.triton_runs(torch.device("cuda", 4))


@pytest.mark.gpu
def test_compiled_it_learns_the_same():
    batch = Batch(tokens=some_tokens(length=64).cuda(), targets=some_tokens(length=64, seed=2).cuda())
    found = []
    for compiled in (True, False):
        network = toy(decoder(), torch.float32).cuda()
        objective = build_objective(network, TrainConfig(steps=1, batch_size=2, compile=compiled))
        assert objective.fuses_head
        losses = objective(batch)
        losses.total.backward()
        found.append((losses.total.detach(), {name: weight.grad for name, weight in network.named_parameters()}))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)
    assert len(network.output_table) == VOCAB
