"""What a check gives back, and the verdict on it.

    finding = examine("padded left == unpadded", padded_left, subject); finding.verdict   # pass, fail or skipped

The difference is the largest absolute one among logits. float32 keeps seven digits of a number, whatever its size:
so the tolerance is meant for logits of order one and grows with those of the likeliest tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.verification.subject import Subject

# For logits of order one. In half precision, of three digits or two, a mixture may even choose other experts: float32
# and float64 prove more.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 1e-1}


class Skipped(Exception):  # noqa: N818  (not an error: the check has nothing to say about this model)
    """Why a check does not apply."""


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Comparison:
    """Logits that came about in two ways, pair by pair: the way checked, and the way it must agree with."""

    pairs: Sequence[Pair]
    detail: str
    tolerance: float | None = None  # where the two need not be equal; None: as the precision allows

    @property
    def difference(self) -> float:
        """The largest; NaN where a logit is."""
        return torch.tensor([largest_gap(found, expected) for found, expected in self.pairs]).max().item()

    @property
    def magnitude(self) -> float:
        """Of the likeliest tokens' logits: one that is ruled out may stand at -10000 (the padding of Marian)."""
        return max(expected.amax(dim=-1).abs().max().item() for _, expected in self.pairs)


def largest_gap(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return math.inf
    both_ruled_out = (found == -math.inf) & (expected == -math.inf)  # by the bias of a head
    return (found - expected).abs().masked_fill(both_ruled_out, 0.0).max().item()


Check = Callable[[Subject], Comparison]


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Literal["pass", "fail", "skipped"]
    detail: str
    difference: float | None = None
    tolerance: float | None = None

    def as_data(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity."""
        numbers = {"largest_difference": self.difference, "tolerance": self.tolerance}
        finite = {name: n if n is not None and math.isfinite(n) else None for name, n in numbers.items()}
        return {"check": self.check, **finite, "verdict": self.verdict, "detail": self.detail}


@torch.inference_mode()
def examine(name: str, check: Check, subject: Subject) -> Finding:
    try:
        comparison = check(subject)
    except Skipped as reason:
        return Finding(name, "skipped", str(reason))
    except Exception as error:  # whatever breaks in a check is its finding: those of the others must not be lost
        return Finding(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0])
    difference = comparison.difference
    tolerance = comparison.tolerance or TOLERANCES[subject.dtype] * max(1.0, comparison.magnitude)
    agrees = difference <= tolerance < math.inf
    return Finding(name, "pass" if agrees else "fail", comparison.detail, difference, tolerance)
