"""Learning rates against torch's own schedulers and the formula of the paper."""

import math

import pytest
import torch
from transformers import optimization

from clearhead.errors import ClearheadError
from clearhead.training.config import TrainConfig
from clearhead.training.schedule import Constant, Cosine, Linear, Noam, WarmupStableDecay, factor

STEPS = 40


def factors(schedule, num_steps=STEPS):
    return [factor(schedule, step, num_steps=num_steps, width=512) for step in range(num_steps)]


def rates(make):
    """The learning rates of a transformers schedule."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_noam_is_the_formula():
    for step in (0, 1, 3998, 3999, 4000, 20000):
        count = step + 1
        expected = 512**-0.5 * min(count**-0.5, count * 4000**-1.5)
        assert factor(Noam(warmup_steps=4000), step, num_steps=1, width=512) == pytest.approx(expected)
    made = factors(Noam(warmup_steps=10))
    assert max(made) == made[9] == pytest.approx(512**-0.5 * 10**-0.5)


def test_cosine_and_linear_are_those_of_transformers():
    cosine = rates(lambda optimizer: optimization.get_cosine_schedule_with_warmup(optimizer, 0, STEPS))
    assert factors(Cosine(final=0.0)) == pytest.approx(cosine, abs=1e-7)
    linear = rates(lambda optimizer: optimization.get_linear_schedule_with_warmup(optimizer, 0, STEPS))
    assert factors(Linear()) == pytest.approx(linear, abs=1e-7)


@pytest.mark.parametrize("schedule", [Linear(warmup_steps=9), Cosine(warmup_steps=9), Constant(warmup_steps=9)])
def test_warm_up_rises_in_equal_steps_to_one(schedule):
    assert factors(schedule)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_the_fall_ends_at_the_final_factor():
    for schedule in (Cosine(warmup_steps=5, final=0.2), Linear(final=0.2), WarmupStableDecay(decay_steps=7, final=0.2)):
        assert factor(schedule, STEPS, num_steps=STEPS, width=1) == pytest.approx(0.2)
        assert factor(schedule, STEPS - 1, num_steps=STEPS, width=1) > 0.2


def test_warmup_stable_decay_has_three_parts():
    made = factors(WarmupStableDecay(warmup_steps=4, decay_steps=10, final=0.0))
    assert made[4:31] == [1.0] * 27
    assert made[30:] == pytest.approx([1 - step / 10 for step in range(10)])
    assert made[:4] == sorted(made[:4])


def test_all_are_between_zero_and_one():
    for schedule in (Linear(warmup_steps=39), Cosine(warmup_steps=40), WarmupStableDecay(decay_steps=40)):
        assert all(0 <= value <= 1 and math.isfinite(value) for value in factors(schedule))


def test_a_schedule_longer_than_the_run_is_refused():
    sentence = "train.schedule.warmup_steps 20 and train.schedule.decay_steps 40 do not fit into train.steps 50"
    with pytest.raises(ClearheadError, match=sentence):
        TrainConfig(steps=50, batch_size=1, schedule=WarmupStableDecay(warmup_steps=20, decay_steps=40))
