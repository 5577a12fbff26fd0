"""Compare the schedules with those of transformers and the formula of the paper."""

import math

import pytest
import torch
from transformers import optimization

from clearhead.errors import ClearheadError
from clearhead.training.config import TrainConfig
from clearhead.training.schedule import Constant, Cosine, Linear, Noam, WarmupStableDecay, learning_rate_factor

STEPS = 40


def factors(schedule, num_steps=STEPS):
    return [learning_rate_factor(schedule, step, num_steps=num_steps, width=512) for step in range(num_steps)]


def reference_rates(make_scheduler):
    """Return the learning rates of a schedule of transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_noam_equals_the_formula():
    for step in (0, 1, 3998, 3999, 4000, 20000):
        count = step + 1
        expected = 512**-0.5 * min(count**-0.5, count * 4000**-1.5)
        assert learning_rate_factor(Noam(warmup_steps=4000), step, num_steps=1, width=512) == pytest.approx(expected)
    noam = factors(Noam(warmup_steps=10))
    assert max(noam) == noam[9] == pytest.approx(512**-0.5 * 10**-0.5)


def test_cosine_and_linear_equal_those_of_transformers():
    cosine = reference_rates(lambda optimizer: optimization.get_cosine_schedule_with_warmup(optimizer, 0, STEPS))
    assert factors(Cosine(final=0.0)) == pytest.approx(cosine, abs=1e-7)
    linear = reference_rates(lambda optimizer: optimization.get_linear_schedule_with_warmup(optimizer, 0, STEPS))
    assert factors(Linear()) == pytest.approx(linear, abs=1e-7)


@pytest.mark.parametrize("schedule", [Linear(warmup_steps=9), Cosine(warmup_steps=9), Constant(warmup_steps=9)])
def test_warm_up_rises_linearly_to_one(schedule):
    assert factors(schedule)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_the_decay_ends_at_the_final_factor():
    for schedule in (Cosine(warmup_steps=5, final=0.2), Linear(final=0.2), WarmupStableDecay(decay_steps=7, final=0.2)):
        assert learning_rate_factor(schedule, STEPS, num_steps=STEPS, width=1) == pytest.approx(0.2)
        assert learning_rate_factor(schedule, STEPS - 1, num_steps=STEPS, width=1) > 0.2


def test_warmup_stable_decay_has_three_phases():
    wsd = factors(WarmupStableDecay(warmup_steps=4, decay_steps=10, final=0.0))
    assert wsd[4:31] == [1.0] * 27
    assert wsd[30:] == pytest.approx([1 - step / 10 for step in range(10)])
    assert wsd[:4] == sorted(wsd[:4])


def test_all_factors_are_between_zero_and_one():
    for schedule in (Linear(warmup_steps=39), Cosine(warmup_steps=40), WarmupStableDecay(decay_steps=40)):
        assert all(0 <= value <= 1 and math.isfinite(value) for value in factors(schedule))


def test_a_schedule_longer_than_the_run_is_rejected():
    message = "train.schedule.warmup_steps 20 plus train.schedule.decay_steps 40 is more than train.steps 50"
    with pytest.raises(ClearheadError, match=message):
        TrainConfig(steps=50, batch_size=1, schedule=WarmupStableDecay(warmup_steps=20, decay_steps=40))
