"""Take a part away and see what the model says then.

effect = ablate(trace, layer=3, head=2); effect.divergence   # nats; 0: the head does not matter here
"""

from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import unknown
from clearhead.inspection.effect import Effect
from clearhead.inspection.heads import index
from clearhead.inspection.sites import Part, changed, site
from clearhead.inspection.trace import Trace


def ablate(
    trace: Trace,
    layer: int,
    head: int | None = None,
    part: Part | None = None,
    *,
    by: Literal["zero", "mean"] = "zero",
    position: int = -1,
    stack: str | None = None,
) -> Effect:
    """One head, one branch (`attention`, `feed_forward`) or the whole layer, at every token; the effect at `position`.

    What a head or branch gives becomes zero, or its mean over the text's tokens, which later parts find less strange.
    A whole layer is passed by: the stream leaves it as it came, or with the mean of what it adds.
    """
    if by not in ("zero", "mean"):
        raise unknown("way to ablate", by, ("zero", "mean"))
    part = part or ("layer" if head is None else "attention")
    position = index("position", position, len(trace.tokens))
    came: list[Tensor] = []

    def empty(x: Tensor) -> Tensor:
        base = came[0] if part == "layer" else torch.zeros_like(x)
        return base + (x - base).mean(dim=1, keepdim=True) if by == "mean" else base

    def keep(x: Tensor) -> Tensor:
        came.append(x)
        return x

    place = site(trace, layer, part, head, stack)
    if part == "layer":
        with changed(site(trace, layer, "stream", stack=stack), keep), changed(place, empty):
            after = trace.run_again()
    else:
        with changed(place, empty):
            after = trace.run_again()
    return Effect.of(trace.logits[position], after[position])
