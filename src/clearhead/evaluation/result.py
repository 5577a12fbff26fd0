"""What an evaluation found: its measures, how sure they are, and the settings that they hold for; no torch.

Result("piqa", 100, (measure("accuracy", [True] * 68 + [False] * 32),), {})   # accuracy 0.68 ± 0.047
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import unknown_name

Progress = Callable[[int, int], None]
"""Called as progress(done, total), many times."""


@dataclass(frozen=True)
class Measure:
    name: str
    value: float
    standard_error: float | None  # None where one example alone says nothing of it


@dataclass(frozen=True)
class Result:
    task: str
    num_examples: int
    measures: tuple[Measure, ...]
    settings: Mapping[str, int | str]

    def __getitem__(self, name: str) -> float:
        """The value of the measure `name`."""
        values = {measure.name: measure.value for measure in self.measures}
        if name not in values:
            raise unknown_name(f"measure of {self.task}:", name, values)
        return values[name]

    def as_dict(self) -> dict[str, Any]:
        measures = {one.name: {"value": one.value, "standard_error": one.standard_error} for one in self.measures}
        return {"task": self.task, "examples": self.num_examples, "measures": measures, "settings": dict(self.settings)}


def measure(name: str, values: Sequence[float]) -> Measure:
    """The mean over examples."""
    return rate(name, values, [1] * len(values))


def rate(name: str, sums: Sequence[float], counts: Sequence[float]) -> Measure:
    """Σ sums / Σ counts over examples of unequal size.

    Its standard error is that of a ratio r, to first order (Cochran 1977, §2.11): with n examples of mean count c̄,
    sqrt(Σ (s - r c)² / (n (n - 1))) / c̄. Where every count is 1, this is the standard error of a mean.
    """
    value, num = math.fsum(sums) / math.fsum(counts), len(sums)
    if num < 2:
        return Measure(name, value, None)
    squares = math.fsum((part - value * count) ** 2 for part, count in zip(sums, counts, strict=True))
    return Measure(name, value, math.sqrt(squares / (num * (num - 1))) * num / math.fsum(counts))


def exponent(x: float) -> float:
    """e^x, infinite where no float holds it."""
    return math.exp(x) if x < math.log(sys.float_info.max) else math.inf


def exponential(name: str, of: Measure) -> Measure:
    """exp(x); its standard error to first order is exp(x) times that of x."""
    value = exponent(of.value)
    return Measure(name, value, None if of.standard_error is None else value * of.standard_error)
