"""Comparisons of logits, their tolerances, and the verdict on each check.

    result = run_check("left padding == no padding", left_padding, case); result.verdict   # pass, fail or skipped

The difference is the largest absolute difference of two logits. float32 keeps seven digits of a number of any size, so
the tolerance is stated for logits of order one and grows with the logit of the most likely token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.verification.case import VerificationCase

# For logits of order one. float16 has three digits and bfloat16 two, and a mixture may even choose other experts there:
# float32 and float64 prove more.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class CheckSkipped(Exception):  # noqa: N818  (not an error)
    """Raised by a check that does not apply to the model; the message is the reason."""


LogitPair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LogitComparison:
    """Logits computed in two ways: each pair has the logits of the checked method and the expected ones."""

    pairs: Sequence[LogitPair]
    detail: str
    tolerance: float | None = None  # None: that of the dtype, for methods that should be equal

    @property
    def difference(self) -> float:
        """The largest difference of all pairs; NaN if any logit is NaN."""
        return torch.tensor([largest_difference(actual, expected) for actual, expected in self.pairs]).max().item()

    @property
    def magnitude(self) -> float:
        """The largest absolute logit of a most likely token.

        Other logits do not count: a token can be excluded with a logit of -10000, as padding is in Marian.
        """
        return max(expected.amax(dim=-1).abs().max().item() for _, expected in self.pairs)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference, infinity if the shapes differ; tokens excluded in both do not count."""
    if actual.shape != expected.shape:
        return math.inf
    excluded_in_both = (actual == -math.inf) & (expected == -math.inf)  # the bias of a vocabulary head excludes tokens
    return (actual - expected).abs().masked_fill(excluded_in_both, 0.0).max().item()


Check = Callable[[VerificationCase], LogitComparison]


@dataclass(frozen=True)
class CheckResult:
    """The verdict on one check, with the largest difference and its tolerance if the check ran."""

    check: str
    verdict: Literal["pass", "fail", "skipped"]
    detail: str
    difference: float | None = None
    tolerance: float | None = None

    def as_data(self) -> dict[str, Any]:
        """Return the result as JSON data; null replaces NaN and infinity."""
        numbers = {"largest_difference": self.difference, "tolerance": self.tolerance}
        finite = {name: n if n is not None and math.isfinite(n) else None for name, n in numbers.items()}
        return {"check": self.check, **finite, "verdict": self.verdict, "detail": self.detail}


def run_check(name: str, check: Check, case: VerificationCase) -> CheckResult:
    """Run one check; any exception but CheckSkipped is a failure, so that the other checks still run."""
    return judge(name, lambda: check(case), case.dtype)


@torch.inference_mode()
def judge(name: str, compare: Callable[[], LogitComparison], dtype: torch.dtype) -> CheckResult:
    """Run a comparison and return the verdict on it; see `run_check`."""
    try:
        comparison = compare()
    except CheckSkipped as reason:
        return CheckResult(name, "skipped", str(reason))
    except Exception as error:
        return CheckResult(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0])
    difference = comparison.difference
    tolerance = comparison.tolerance
    if tolerance is None:
        tolerance = TOLERANCES[dtype] * max(1.0, comparison.magnitude)
    agrees = difference <= tolerance < math.inf
    return CheckResult(name, "pass" if agrees else "fail", comparison.detail, difference, tolerance)
