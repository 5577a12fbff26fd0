"""SplitMix64 equals published numbers and Python's integers; drawn tokens have the distribution they should have."""

import math
import random

import pytest
import torch

from clearhead.sampling.randomness import draw_tokens, shift_right, splitmix, uniforms


def chi_square_bound(degrees: int, deviations: float = 4.0) -> float:
    """Return the quantile at `deviations` standard deviations (Wilson & Hilferty 1931); 4: 3 in 100,000 exceed it."""
    ninth = 2 / (9 * degrees)
    return degrees * (1 - ninth + deviations * math.sqrt(ninth)) ** 3


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def plain_splitmix(seed: int, index: int) -> int:
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_splitmix_equals_the_published_numbers():
    """Rosetta Code, "Pseudo-random numbers/Splitmix64", seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    published.append(16408922859458223821)
    numbers = splitmix(torch.tensor(1234567), torch.arange(5))
    assert [number % 2**64 for number in numbers.tolist()] == published


def test_splitmix_is_arithmetic_modulo_2_to_the_64():
    generator = random.Random(0)
    seeds = [generator.randrange(-(2**63), 2**63) for _ in range(500)] + [0, -1, 2**63 - 1, -(2**63)]
    indices = [generator.randrange(2**40) for _ in seeds]
    numbers = splitmix(torch.tensor(seeds), torch.tensor(indices)).tolist()
    assert [number % 2**64 for number in numbers] == [
        plain_splitmix(seed, index) for seed, index in zip(seeds, indices, strict=True)
    ]


def test_shift_right_fills_with_zeros():
    assert shift_right(torch.tensor([-1, 2**62, 5]), 1).tolist() == [2**63 - 1, 2**61, 2]


def test_uniforms_depend_only_on_seed_step_and_index():
    seeds, steps = torch.tensor([3, -8, 3, 2**62]), torch.tensor([0, 5, 1, 1000])
    batch = uniforms(seeds, steps, count=257)
    assert batch.unique().numel() == batch.numel()
    for row in range(4):
        assert torch.equal(uniforms(seeds[row : row + 1], steps[row : row + 1], 100)[0], batch[row, :100])


def test_adjacent_seeds_and_steps_share_no_number():
    seeds, steps = torch.arange(-50, 50).repeat_interleave(100), torch.arange(100).repeat(100)
    assert uniforms(seeds, steps, count=3).unique().numel() == 30_000


def test_uniforms_are_never_0_or_1(monkeypatch):
    extremes = torch.tensor([[0, -1, 2**63 - 1, -(2**63)]])
    monkeypatch.setattr("clearhead.sampling.randomness.splitmix", lambda seeds, index: extremes)
    numbers = uniforms(torch.tensor([0]), torch.tensor([0]), 4)[0]
    assert float(numbers.min()) == 2.0**-53
    assert float(numbers.max()) == 1 - 2.0**-53
    assert torch.log(-torch.log(numbers)).isfinite().all()


@pytest.mark.parametrize(
    ("seeds", "steps", "count"),
    [
        (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 200_000),
        (torch.full((200_000,), 7), torch.arange(200_000), 1),
        (torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64), 1),
    ],
    ids=["over the vocabulary", "over steps", "over adjacent seeds"],
)
def test_uniforms_are_uniform_and_adjacent_ones_independent(seeds, steps, count):
    numbers = uniforms(seeds, steps, count).flatten()
    cells = (numbers * 64).long()
    flat = torch.full((64,), 1 / 64)
    assert chi_square(cells.bincount(minlength=64), flat) < chi_square_bound(63)
    pairs = (numbers[:-1] * 16).long() * 16 + (numbers[1:] * 16).long()
    assert chi_square(pairs.bincount(minlength=256), torch.full((256,), 1 / 256)) < chi_square_bound(255)
    low_bits = (numbers * 2**52).long() % 64
    assert chi_square(low_bits.bincount(minlength=64), flat) < chi_square_bound(63)


@pytest.mark.parametrize("over", ["steps", "seeds"])
def test_drawn_tokens_are_distributed_as_softmax(over, generator):
    logits = torch.randn(12, generator=generator) * 2
    logits[3] = -math.inf
    counts = torch.zeros(12, dtype=torch.int64)
    for start in range(0, 200_000, 50_000):
        varying, fixed = torch.arange(start, start + 50_000), torch.full((50_000,), 42)
        seeds, steps = (varying, fixed) if over == "seeds" else (fixed, varying)
        counts += draw_tokens(logits.expand(50_000, 12), seeds, steps).bincount(minlength=12)
    assert counts[3] == 0
    possible = logits > -math.inf
    assert chi_square(counts[possible], logits.softmax(-1)[possible]) < chi_square_bound(10)


def test_successive_tokens_are_independent():
    logits = torch.tensor([0.5, -0.3, 0.1, -1.0])
    tokens = draw_tokens(logits.expand(100_000, 4), torch.full((100_000,), 9), torch.arange(100_000))
    probabilities = logits.softmax(-1)
    pairs = tokens[:-1] * 4 + tokens[1:]
    assert chi_square(
        pairs.bincount(minlength=16), torch.outer(probabilities, probabilities).flatten()
    ) < chi_square_bound(15)


def test_the_chi_square_test_rejects_a_wrong_distribution():
    counts = (torch.tensor([0.26, 0.25, 0.25, 0.24]) * 200_000).round()
    assert chi_square(counts, torch.full((4,), 0.25)) > chi_square_bound(3)


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 50_257])
def test_a_sequence_draws_the_same_tokens_alone_and_in_a_batch(vocab_size, generator):
    logits = torch.randn(9, vocab_size, generator=generator)
    seeds, steps = torch.tensor([5, 5, 0, 1, 2, -1, 2**60, 7, 5]), torch.tensor([0, 1, 0, 0, 3, 4, 9, 9, 0])
    together = draw_tokens(logits, seeds, steps)
    for row in range(9):
        assert draw_tokens(logits[row, None], seeds[row, None], steps[row, None]) == together[row]
    order = torch.randperm(9, generator=generator)
    assert torch.equal(draw_tokens(logits[order], seeds[order], steps[order]), together[order])


def gumbel_draw(logits, seeds, steps):
    """Draw tokens with random numbers for the whole vocabulary."""
    noise = -torch.log(-torch.log(uniforms(seeds, steps, logits.shape[-1])))
    return (logits.double() + noise).argmax(dim=-1)


@pytest.mark.parametrize("vocab_size", [1, 9, 1000, 50_257])
def test_random_numbers_of_tokens_that_cannot_be_drawn_do_not_matter(vocab_size, generator):
    seeds, steps = torch.arange(6) * 11, torch.arange(6)
    logits = torch.randn(6, vocab_size, generator=generator)
    for share in (0.5, 0.1, 0.001, 0.0):
        kept = torch.rand(6, vocab_size, generator=generator) < share
        kept[:5, vocab_size // 2] = True  # the last row may be empty
        filtered = logits.masked_fill(~kept, -torch.inf)
        assert torch.equal(draw_tokens(filtered, seeds, steps), gumbel_draw(filtered, seeds, steps))


def test_a_logit_that_is_nan_is_drawn():
    logits = torch.full((2, 100), -torch.inf)
    logits[0, 7], logits[1, 50:52] = 1, torch.tensor([1.0, torch.nan])
    assert draw_tokens(logits, torch.tensor([1, 2]), torch.tensor([0, 0])).tolist() == [7, 51]
