"""Ablation: remove a part of the network and measure how its prediction changes.

effect = ablate(trace, layer=3, head=2); effect.divergence   # nats; 0 if the head does not matter here
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from clearhead.errors import unknown_name
from clearhead.inspection.effect import Effect
from clearhead.inspection.intervention import Part, find_site, with_intervention
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
    """Remove a head, a branch (`attention`, `feed_forward`) or a whole layer at every token.

    Return the effect on the prediction at `position`. The output of a head or branch becomes zero, or, with
    by="mean", its mean over the tokens of the text, which later parts find less unusual. A whole layer (the default
    without `head` and `part`) is skipped: it passes the residual stream on unchanged, or adds its mean contribution.
    """
    if by not in ("zero", "mean"):
        raise unknown_name("ablation", by, ("zero", "mean"))
    part = part or ("layer" if head is None else "attention")
    site, position = find_site(trace, layer, part, head, stack), trace.resolve_position(position)
    name, layer = trace.resolve_layer(layer, stack)
    baseline = trace.residual(layer, name) if part == "layer" else torch.zeros(())

    def remove(x: Tensor) -> Tensor:
        removed = baseline.to(x).expand_as(x)
        return removed + (x - removed).mean(dim=1, keepdim=True) if by == "mean" else removed

    after = trace.rerun(position, with_intervention(trace.require_network(), site, remove))
    return Effect.from_logits(trace.logits_at(position), after)


def ablate_parts(trace: Trace, parts: Sequence[tuple[int, str, int | None]], *, position: int = -1) -> Effect:
    """Remove several heads and branches at once, at every token; return the effect on the prediction at `position`.

    parts: (layer, "attention", head) for a head, (layer, "attention", None) and (layer, "feed_forward", None) for a
    branch. Their outputs become zero. Without parts, nothing changes and nothing is computed again.
    """
    network, position = trace.require_network(), trace.resolve_position(position)
    for layer, part, head in parts:
        if part not in ("attention", "feed_forward"):
            raise unknown_name("part", part, ("attention", "feed_forward"))
        network = with_intervention(network, find_site(trace, layer, cast(Part, part), head), torch.zeros_like)
    before = trace.logits_at(position)
    return Effect.from_logits(before, trace.rerun(position, network) if parts else before)
