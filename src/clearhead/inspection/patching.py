"""Put what one text made the network think into its run on another, and see what it says then.

    effect = patch(clean, corrupted, layer=3, places=[4])   # clean's stream before layer 3, at token 4

Activation patching, also causal tracing (Vig et al. 2020; Meng et al. 2022): if the answer to `clean` comes back,
what was put in carried it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.effect import Effect
from clearhead.inspection.heads import index
from clearhead.inspection.sites import Part, changed, site
from clearhead.inspection.trace import Trace


def patch(
    clean: Trace,
    corrupted: Trace,
    layer: int,
    places: Iterable[int] | None = None,
    part: Part | None = None,
    head: int | None = None,
    *,
    position: int = -1,
) -> Effect:
    """The run on `corrupted` with a part of `clean` in these places (None: all); the effect at `position`.

    The part is the stream before the layer, or a head's output, unless it is named.
    """
    check_pair(clean, corrupted)
    length = len(corrupted.tokens)
    position = corrupted.position(position)
    part = part or ("stream" if head is None else "attention")
    put_in = heard_at(clean, layer, part, head)
    rows = range(length) if places is None else [index("place", number, length) for number in places]
    chosen = torch.tensor(list(rows), dtype=torch.long, device=put_in.device)
    place = site(corrupted, layer, part, head)
    patched = changed(corrupted.need_network(), place, lambda x: x.index_copy(1, chosen, put_in[:, chosen]))
    after = corrupted.run_again(position, patched)
    return Effect.of(corrupted.logits_at(position), after)


def restoration(clean: Trace, corrupted: Trace, token: int, *, position: int = -1) -> Tensor:
    """Patch the stream at each layer and token in turn: the log-probability that `token` gains (L, T)."""
    layers, places = range(corrupted.num_layers), range(len(corrupted.tokens))
    gains = [[patch(clean, corrupted, one, [at], position=position).gain(token) for at in places] for one in layers]
    return torch.tensor(gains)


def heard_at(trace: Trace, layer: int, part: Part, head: int | None) -> Tensor:
    """The value at a site in the traced run."""
    if part == "stream" and head is None:
        return trace.residual(trace.place(layer, None)[1])[None]
    residuals: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        residuals.append(x)
        return x

    trace.run_again(-1, changed(trace.need_network(), site(trace, layer, part, head), keep))
    return residuals[0]


def check_pair(clean: Trace, corrupted: Trace) -> None:
    if clean.network is not corrupted.network:
        raise ClearheadError("the two traces are of different models; trace both texts with one")
    if len(clean.tokens) != len(corrupted.tokens):
        raise ClearheadError(
            f"the texts have {len(clean.tokens)} and {len(corrupted.tokens)} tokens; patching needs as many in both"
        )
