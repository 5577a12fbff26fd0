"""The result of an evaluation: its metrics, their standard errors, and the settings they depend on; no torch.

EvaluationResult("piqa", 100, (mean_metric("accuracy", [True] * 68 + [False] * 32),), {})   # accuracy 0.68 ± 0.047
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import unknown_name

Progress = Callable[[int, int], None]
"""Called repeatedly as progress(done, total)."""


@dataclass(frozen=True)
class Metric:
    """A number that an evaluation measured."""

    name: str
    value: float
    standard_error: float | None  # None if there is only one example


@dataclass(frozen=True)
class EvaluationResult:
    """The metrics of one task; `result["accuracy"]` is the value of one of them."""

    task: str
    num_examples: int
    metrics: tuple[Metric, ...]
    settings: Mapping[str, int | str]

    def __getitem__(self, name: str) -> float:
        values = {metric.name: metric.value for metric in self.metrics}
        if name not in values:
            raise unknown_name(f"metric of {self.task}:", name, values)
        return values[name]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        metrics = {one.name: {"value": one.value, "standard_error": one.standard_error} for one in self.metrics}
        return {"task": self.task, "examples": self.num_examples, "metrics": metrics, "settings": dict(self.settings)}


def mean_metric(name: str, values: Sequence[float]) -> Metric:
    """Return the mean over examples."""
    return ratio_metric(name, values, [1] * len(values))


def ratio_metric(name: str, sums: Sequence[float], counts: Sequence[float]) -> Metric:
    """Return Σ sums / Σ counts over examples of unequal size.

    The standard error is that of a ratio r, to first order (Cochran 1977, §2.11): with n examples of mean count c̄,
    sqrt(Σ (s - r c)² / (n (n - 1))) / c̄. If every count is 1, this is the standard error of a mean.
    """
    value, num = math.fsum(sums) / math.fsum(counts), len(sums)
    if num < 2:
        return Metric(name, value, None)
    squares = math.fsum((part - value * count) ** 2 for part, count in zip(sums, counts, strict=True))
    return Metric(name, value, math.sqrt(squares / (num * (num - 1))) * num / math.fsum(counts))


def exponential_metric(name: str, exponent: Metric) -> Metric:
    """Return exp(x), infinity if it overflows; its standard error to first order is exp(x) times that of x."""
    value = math.exp(exponent.value) if exponent.value < math.log(sys.float_info.max) else math.inf
    return Metric(name, value, None if exponent.standard_error is None else value * exponent.standard_error)
