"""How the learning rate moves: pure functions of the step, times the rate in the recipe.

    rate = optimizer.learning_rate * factor(Cosine(warmup_steps=100), step, num_steps=5000, width=384)

Steps are counted from 0: the first update already moves, and the fall would end with the step after the last.
"""

import math
from dataclasses import dataclass

from clearhead.config import Checked
from clearhead.errors import require


@dataclass(frozen=True, kw_only=True)
class Constant(Checked):
    MAY_BE_ZERO = ("warmup_steps",)

    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Linear(Checked):
    """Straight down from 1 after the warm-up to `final`."""

    MAY_BE_ZERO = ("final", "warmup_steps")

    warmup_steps: int = 0
    final: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Checked):
    """Half a wave from 1 after the warm-up to `final` (Loshchilov & Hutter 2017, without restarts)."""

    MAY_BE_ZERO = ("final", "warmup_steps")

    warmup_steps: int = 0
    final: float = 0.1


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(Checked):
    """Level until the last `decay_steps`, then straight down to `final` (Hu et al. 2024, §4)."""

    MAY_BE_ZERO = ("final", "warmup_steps")

    warmup_steps: int = 0
    decay_steps: int
    final: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Noam(Checked):
    """width^-½ · min(s^-½, s · warmup^-3/2) with s = step + 1 (Vaswani et al. 2017, §5.3); its rate is 1."""

    warmup_steps: int = 4000


Schedule = Constant | Linear | Cosine | WarmupStableDecay | Noam


def factor(schedule: Schedule, step: int, *, num_steps: int, width: int) -> float:
    """What the learning rate is multiplied by at this step of `num_steps`."""
    if isinstance(schedule, Noam):
        count = step + 1
        return float(width**-0.5 * min(count**-0.5, count * schedule.warmup_steps**-1.5))
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    match schedule:
        case Constant():
            return 1.0
        case Linear(final=final):
            return 1.0 - (1.0 - final) * gone(step, schedule.warmup_steps, num_steps)
        case Cosine(final=final):
            wave = 0.5 * (1.0 + math.cos(math.pi * gone(step, schedule.warmup_steps, num_steps)))
            return final + (1.0 - final) * wave
        case WarmupStableDecay(final=final):
            return 1.0 - (1.0 - final) * gone(step, num_steps - schedule.decay_steps, num_steps)


def gone(step: int, start: int, num_steps: int) -> float:
    """Part of the way from step `start` to the end, from 0 to 1."""
    return max(0.0, (step - start) / (num_steps - start)) if step < num_steps else 1.0


def check(schedule: Schedule, num_steps: int) -> None:
    """The parts of a schedule fit into the steps there are."""
    taken = {"warmup_steps": schedule.warmup_steps}
    if isinstance(schedule, WarmupStableDecay):
        taken["decay_steps"] = schedule.decay_steps
    fits = isinstance(schedule, Constant | Noam) or sum(taken.values()) <= num_steps
    named = " and ".join(f"train.schedule.{name} {count}" for name, count in taken.items())
    require(fits, f"{named} do not fit into train.steps {num_steps}; lower the former or raise the latter")
