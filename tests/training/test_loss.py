"""Test that the loss equals torch's, at once or in chunks, and that k batches of b rows equal one of k·b."""

import pytest
import torch
from torch.nn import functional

from clearhead.data.batch import IGNORED, Batch
from clearhead.training.config import TrainConfig
from clearhead.training.loss import chunked_cross_entropy, cross_entropy
from clearhead.training.objective import Objective
from tests.model.toys import VOCAB, decoder, toy


@pytest.fixture
def logits_and_targets():
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(3, 7, 11), torch.randint(0, 11, (3, 7))
    targets[0, 4:] = IGNORED
    targets[2, :2] = IGNORED
    return logits, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torch(logits_and_targets, smoothing):
    logits, targets = logits_and_targets
    losses = cross_entropy(logits, targets, smoothing)
    count = (targets != IGNORED).sum()
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(losses.total / count, expected)
    plain = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(losses.cross_entropy / count, plain)


def test_z_loss_is_the_squared_log_of_the_softmax_denominator(logits_and_targets):
    logits, targets = logits_and_targets
    added = cross_entropy(logits, targets, z_weight=0.01).total - cross_entropy(logits, targets).total
    log_z = logits.exp().sum(-1).log()[targets != IGNORED]
    torch.testing.assert_close(added, 0.01 * log_z.square().sum(), rtol=1e-4, atol=1e-5)


def test_half_precision_logits_are_summed_in_float32():
    logits, targets = torch.randn(4, 9, 11).bfloat16(), torch.randint(0, 11, (4, 9))
    total = cross_entropy(logits, targets).total
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, cross_entropy(logits.float(), targets).total)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 8, 100])
def test_chunked_cross_entropy_equals_cross_entropy(logits_and_targets, chunk_tokens):
    _, targets = logits_and_targets
    hidden = torch.randn(3, 7, 5, requires_grad=True)
    weight = torch.randn(11, 5, requires_grad=True)

    def compute_logits(states):
        return functional.linear(states, weight)

    full = cross_entropy(compute_logits(hidden), targets, 0.1, 0.01)
    expected = torch.autograd.grad(full.total, (hidden, weight))
    chunked = chunked_cross_entropy(hidden, targets, compute_logits, chunk_tokens, 0.1, 0.01)
    gradients = torch.autograd.grad(chunked.total, (hidden, weight))
    torch.testing.assert_close(chunked, full, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_chunked_cross_entropy_computes_logits_of_one_chunk_at_a_time():
    sizes = []

    def compute_logits(states):
        sizes.append(states.shape[:2].numel())
        return states

    targets = torch.randint(0, 5, (4, 8))
    hidden = torch.randn(4, 8, 5, requires_grad=True)
    chunked_cross_entropy(hidden, targets, compute_logits, chunk_tokens=6).total.backward()
    assert max(sizes) == 6
    assert sum(sizes) == 2 * 32  # in the forward and again in the backward pass


def ragged_batch(num_rows, length=9):
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(0, VOCAB, (num_rows, length + 1), generator=generator)
    mask = torch.arange(length)[None] < torch.randint(1, length + 1, (num_rows, 1), generator=generator)
    return Batch(tokens=ids[:, :-1], targets=ids[:, 1:].masked_fill(~mask, IGNORED), mask=mask)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulated_parts_of_unequal_length_equal_one_batch(parts):
    """A mean of means would give tokens of short rows more weight."""
    network, batch = toy(decoder(), torch.float32), ragged_batch(8)
    objective = Objective(network, TrainConfig(steps=1, batch_size=8))
    objective(batch).total.div(batch.num_targets).backward()
    expected = [parameter.grad.clone() for parameter in network.parameters()]
    for divide_by_total in (True, False):
        network.zero_grad()
        for rows in torch.arange(8).chunk(parts):
            part = Batch(tokens=batch.tokens[rows], targets=batch.targets[rows], mask=batch.mask[rows])
            divisor = batch.num_targets if divide_by_total else parts * part.num_targets
            objective(part).total.div(divisor).backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        equal = all(torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(gradients, expected, strict=True))
        assert equal == divide_by_total
