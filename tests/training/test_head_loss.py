"""Compare the fused head loss with autograd, on a GPU if there is one and in Triton's interpreter otherwise."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from clearhead.architecture import Head
from clearhead.data.batch import IGNORED, Batch
from clearhead.training.config import TrainConfig
from clearhead.training.objective import build_objective
from tests.model.toys import VOCAB, decoder, some_tokens, toy

pytest.importorskip("triton", reason="Triton is not installed")
from clearhead.backends import live_checks
from clearhead.training import head_loss as head_loss_module
from clearhead.training.head_loss import can_fuse_head, fused_head_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_LOGITS = 150
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(head_loss_module, "BLOCK", 64)  # three blocks cover a row


def draw(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    parts = [torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_() for shape in ((3, 7, 16), (150, 16), 150)]
    targets = torch.randint(0, NUM_LOGITS, (3, 7), device=DEVICE)
    targets[0, 3:5] = targets[2] = IGNORED
    return (parts if bias else [*parts[:2], None]), targets


def reference_loss(parts, targets, smoothing, z_weight):
    """Return the loss that torch computes from the same logits."""
    logits = functional.linear(*parts).flatten(0, 1).float()
    has_target = targets.flatten() != IGNORED
    total = functional.cross_entropy(
        logits[has_target], targets.flatten()[has_target], reduction="sum", label_smoothing=smoothing
    )
    return total + z_weight * logits[has_target].logsumexp(-1).square().sum()


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize(("smoothing", "z_weight"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_equal_those_of_autograd(dtype, bias, smoothing, z_weight, chunk_tokens):
    parts, targets = draw(dtype, bias)
    inputs = [part for part in parts if part is not None]
    total = reference_loss(parts, targets, smoothing, z_weight)
    losses = fused_head_loss(*parts, targets, smoothing, z_weight, chunk_tokens)
    torch.testing.assert_close(losses.total, total)
    torch.testing.assert_close(losses.cross_entropy, reference_loss(parts, targets, 0.0, 0.0).detach())
    gradients = torch.autograd.grad(losses.total / 12, inputs)
    for gradient, expected in zip(gradients, torch.autograd.grad(total / 12, inputs), strict=True):
        assert gradient.dtype == dtype
        assert (gradient - expected).norm() / expected.norm() < (1e-6 if dtype == torch.float32 else 0.01)


def test_the_incoming_gradient_is_not_rounded_to_bfloat16():
    parts, targets = draw(torch.bfloat16, bias=False)
    factor = 1.41015625  # half way between two bfloat16 numbers
    unscaled, scaled = (
        torch.autograd.grad(fused_head_loss(*parts, targets).total * times, parts[1])[0].double()
        for times in (1.0, factor)
    )
    assert abs((scaled.norm() / unscaled.norm()).item() / factor - 1) < 1e-3  # 2.8e-3 if it were rounded


def test_large_logits_do_not_overflow():
    parts, targets = draw(bias=False)
    with torch.no_grad():
        parts[0].mul_(1e3)
    losses = fused_head_loss(*parts, targets)
    torch.testing.assert_close(losses.total, reference_loss(parts, targets, 0.0, 0.0))
    assert all(part.isfinite().all() for part in torch.autograd.grad(losses.total, parts[:2]))


def test_a_bias_of_minus_infinity_excludes_logits():
    (hidden, matrix, bias), targets = draw()
    with torch.no_grad():
        bias[:100] = -torch.inf  # all of the first of three blocks
    parts, targets = (hidden, matrix, bias), targets.clamp(min=100)
    total, expected = fused_head_loss(*parts, targets).total, reference_loss(parts, targets, 0.0, 0.0)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(torch.autograd.grad(total, parts), torch.autograd.grad(expected, parts))


def test_targets_that_are_not_contiguous():
    (hidden, *head), targets = draw()
    hidden, column = hidden[:, 1:2], targets[:, 1:2]
    torch.testing.assert_close(
        fused_head_loss(hidden, *head, column).total, reference_loss([hidden, *head], column, 0.0, 0.0)
    )


def test_a_bias_gets_a_gradient_if_its_matrix_is_frozen():
    (hidden, matrix, bias), targets = draw()
    parts = hidden.detach(), matrix.detach(), bias
    (expected,) = torch.autograd.grad(reference_loss(parts, targets, 0.0, 0.0), bias)
    torch.testing.assert_close(torch.autograd.grad(fused_head_loss(*parts, targets).total, bias), (expected,))


def test_frozen_inputs_get_no_gradient():
    (hidden, matrix, bias), targets = draw()
    fused_head_loss(hidden, matrix.detach(), bias.detach(), targets).total.backward()
    before = hidden.grad.clone()
    fused_head_loss(hidden.detach(), matrix, bias, targets).total.backward()
    torch.testing.assert_close(hidden.grad, before)
    assert matrix.grad is not None
    with torch.no_grad():
        assert not fused_head_loss(hidden, matrix, bias, targets).total.requires_grad


def test_the_custom_operator_passes_opcheck():
    (hidden, matrix, bias), targets = draw()
    hidden = hidden.detach().flatten(0, 1).requires_grad_()
    arguments = (hidden, matrix, bias, targets.flatten(), 0.1, 0.0, 21, True, True)
    torch.library.opcheck(head_loss_module.head_loss_and_gradients, arguments)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", [Head(), Head(tied=False, bias=True), Head(scale=0.5)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_fused_and_plain_objectives_give_the_same_gradients(head, precision, chunk_tokens, monkeypatch):
    batch = Batch(tokens=some_tokens().to(DEVICE), targets=some_tokens(seed=2).to(DEVICE))
    results = []
    for fuses in (True, False):
        network = toy(replace(decoder(), head=head), torch.float32).to(DEVICE)
        config = TrainConfig(steps=1, batch_size=2, precision=precision, chunk_tokens=chunk_tokens)
        monkeypatch.setattr("clearhead.training.objective.can_fuse_head", lambda network, fuses=fuses: fuses)
        losses = build_objective(network, config)(batch)
        losses.total.backward()
        results.append((losses.total.detach(), {name: weight.grad for name, weight in network.named_parameters()}))
    scale = 1e-6 if precision == "float32" else 0.01
    torch.testing.assert_close(results[0], results[1], rtol=scale, atol=20 * scale)


@pytest.mark.parametrize("head", [Head(softcap=30.0), None], ids=str)
def test_can_fuse_head_rejects_float64_and_other_heads(head, monkeypatch):
    monkeypatch.setattr(head_loss_module, "triton_available", lambda device: True)
    assert can_fuse_head(toy(decoder(), torch.float32))
    assert not can_fuse_head(toy(decoder(), torch.float64))
    assert not can_fuse_head(toy(replace(decoder(), head=head), torch.float32))


def test_triton_needs_a_recent_gpu_a_compiler_and_the_package(monkeypatch):
    network = toy(decoder(), torch.float32)
    assert not can_fuse_head(network)  # on a CPU
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert live_checks.triton_available(torch.device("cuda", 1))
    monkeypatch.setattr(live_checks, "find_spec", lambda name: None)
    assert not live_checks.triton_available(torch.device("cuda", 2))
    monkeypatch.undo()
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (6, 1))
    assert not live_checks.triton_available(torch.device("cuda", 3))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not live_checks.triton_available(torch.device("cuda", 4))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler recommends a lower precision
def test_compiled_objective_gives_the_same_gradients():
    batch = Batch(tokens=some_tokens(length=64).cuda(), targets=some_tokens(length=64, seed=2).cuda())
    results = []
    for compiled in (True, False):
        network = toy(decoder(), torch.float32).cuda()
        objective = build_objective(network, TrainConfig(steps=1, batch_size=2, compile=compiled))
        assert objective.fuses_head
        losses = objective(batch)
        losses.total.backward()
        results.append((losses.total.detach(), {name: weight.grad for name, weight in network.named_parameters()}))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-3)
    assert len(network.token_table) == VOCAB
