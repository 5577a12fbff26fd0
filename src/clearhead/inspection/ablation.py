"""Take a part away and see what the model says then.

effect = ablate(trace, layer=3, head=2); effect.divergence   # nats; 0: the head does not matter here
"""

from typing import Literal

import torch
from torch import Tensor

from clearhead.errors import unknown_name
from clearhead.inspection.effect import Effect
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
        raise unknown_name("way to ablate", by, ("zero", "mean"))
    part = part or ("layer" if head is None else "attention")
    place, position = site(trace, layer, part, head, stack), trace.position(position)
    name, layer = trace.place(layer, stack)
    without = trace.residual(layer, name) if part == "layer" else torch.zeros(())

    def empty(x: Tensor) -> Tensor:
        left = without.to(x).expand_as(x)
        return left + (x - left).mean(dim=1, keepdim=True) if by == "mean" else left

    after = trace.run_again(position, changed(trace.need_network(), place, empty))
    return Effect.of(trace.logits_at(position), after)
