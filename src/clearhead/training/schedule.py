"""Schedule the learning rate: pure functions of the step that return a factor for the rate in the recipe.

    rate = optimizer.learning_rate * learning_rate_factor(Cosine(warmup_steps=100), step, num_steps=5000, width=384)

Steps are numbered from 0. The first step already has a positive rate, and a decay would reach its end one step after
the last.
"""

import math
from dataclasses import dataclass

from clearhead.config import CheckedConfig
from clearhead.errors import require


@dataclass(frozen=True, kw_only=True)
class Constant(CheckedConfig):
    """Stay at 1 after the warm-up."""

    MAY_BE_ZERO = ("warmup_steps",)

    warmup_steps: int = 0  # steps in which the learning rate rises


@dataclass(frozen=True, kw_only=True)
class Linear(CheckedConfig):
    """Decay linearly from 1 after the warm-up to `final`."""

    MAY_BE_ZERO = ("final", "warmup_steps")

    warmup_steps: int = 0  # steps in which the learning rate rises
    final: float = 0.0  # learning rate at the end, as a share of the highest


@dataclass(frozen=True, kw_only=True)
class Cosine(CheckedConfig):
    """Decay along half a cosine wave from 1 after the warm-up to `final` (Loshchilov & Hutter 2017, no restarts)."""

    MAY_BE_ZERO = ("final", "warmup_steps")

    warmup_steps: int = 0  # steps in which the learning rate rises
    final: float = 0.1  # learning rate at the end, as a share of the highest


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(CheckedConfig):
    """Stay at 1 until the last `decay_steps`, then decay linearly to `final` (Hu et al. 2024, §4)."""

    MAY_BE_ZERO = ("final", "warmup_steps")

    warmup_steps: int = 0  # steps in which the learning rate rises
    decay_steps: int  # steps at the end in which the learning rate falls
    final: float = 0.0  # learning rate at the end, as a share of the highest


@dataclass(frozen=True, kw_only=True)
class Noam(CheckedConfig):
    """width^-½ · min(s^-½, s · warmup^-3/2) with s = step + 1 (Vaswani et al. 2017, §5.3), for a learning rate of 1."""

    warmup_steps: int = 4000  # steps in which the learning rate rises


Schedule = Constant | Linear | Cosine | WarmupStableDecay | Noam


def learning_rate_factor(schedule: Schedule, step: int, *, num_steps: int, width: int) -> float:
    """Return the factor for the learning rate at this step of `num_steps`."""
    if isinstance(schedule, Noam):
        count = step + 1
        return float(width**-0.5 * min(count**-0.5, count * schedule.warmup_steps**-1.5))
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    match schedule:
        case Constant():
            return 1.0
        case Linear(final=final):
            return 1.0 - (1.0 - final) * progress(step, schedule.warmup_steps, num_steps)
        case Cosine(final=final):
            wave = 0.5 * (1.0 + math.cos(math.pi * progress(step, schedule.warmup_steps, num_steps)))
            return final + (1.0 - final) * wave
        case WarmupStableDecay(final=final):
            return 1.0 - (1.0 - final) * progress(step, num_steps - schedule.decay_steps, num_steps)


def progress(step: int, start: int, num_steps: int) -> float:
    """Return how far `step` is on the way from step `start` to the end, from 0 to 1."""
    return max(0.0, (step - start) / (num_steps - start)) if step < num_steps else 1.0


def scale_phases(phases: list[int], old_steps: int, new_steps: int) -> list[int]:
    """Return warm-up and decay steps of a run of `old_steps`, scaled to `new_steps` if they are longer than that.

    Return an empty list if they fit. A decay keeps at least one step.
    """
    if not phases or sum(phases) <= new_steps or sum(phases) > old_steps:
        return []
    warmup, *decay = (phase * new_steps // old_steps for phase in phases)
    return [warmup, *(max(steps, 1) for steps in decay)]


def check_schedule(schedule: Schedule, num_steps: int) -> None:
    """Raise ClearheadError if warm-up and decay together are longer than the run."""
    phases = {"warmup_steps": schedule.warmup_steps}
    if isinstance(schedule, WarmupStableDecay):
        phases["decay_steps"] = schedule.decay_steps
    fits = isinstance(schedule, Constant | Noam) or sum(phases.values()) <= num_steps
    named = " plus ".join(f"train.schedule.{name} {count}" for name, count in phases.items())
    require(fits, f"{named} is more than train.steps {num_steps}; lower the former or raise the latter")
