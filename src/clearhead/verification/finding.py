"""What a check gives back, and the verdict on it.

    finding = examine("padded left == unpadded", padded_left, subject); finding.verdict   # pass, fail or skipped

The difference is the largest absolute one among logits. float32 keeps seven digits of a number, whatever its size:
so the tolerance is meant for logits of order one and grows with the largest of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.verification.subject import Subject

# Of one logit of order one. Half precision rounds each product to three digits or two, and says little: prefer float32.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-1}


class Skipped(Exception):  # noqa: N818  (not an error: the check has nothing to say about this model)
    """Why a check does not apply."""


@dataclass(frozen=True)
class Comparison:
    """Logits that came about in two ways, pair by pair: the way checked, and the way it must agree with."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    detail: str

    @property
    def difference(self) -> float:
        """NaN where a logit is NaN on either side; infinite where the shapes differ."""
        largest = [(found - expected).abs().max() for found, expected in self.pairs]
        return torch.stack(largest).max().item()

    @property
    def magnitude(self) -> float:
        return max(expected.abs().max().item() for _, expected in self.pairs)


Check = Callable[[Subject], Comparison]


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Literal["pass", "fail", "skipped"]
    detail: str
    difference: float | None = None
    tolerance: float | None = None

    def as_data(self) -> dict[str, Any]:
        """For JSON, which knows no NaN."""
        finite = self.difference is not None and math.isfinite(self.difference)
        return {
            "check": self.check,
            "largest_difference": self.difference if finite else None,
            "tolerance": self.tolerance,
            "verdict": self.verdict,
            "detail": self.detail,
        }


@torch.inference_mode()
def examine(name: str, check: Check, subject: Subject) -> Finding:
    try:
        comparison = check(subject)
    except Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except (ClearheadError, RuntimeError) as error:
        return Finding(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0])
    difference = comparison.difference
    tolerance = TOLERANCES[subject.dtype] * max(1.0, comparison.magnitude)
    return Finding(name, "pass" if difference <= tolerance else "fail", comparison.detail, difference, tolerance)
