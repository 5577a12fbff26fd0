"""Activation patching: run the network on one text with activations from another.

    effect = patch(clean, corrupted, layer=3, patched_positions=[4])   # clean's residual stream before layer 3, token 4

Also called causal tracing (Vig et al. 2020; Meng et al. 2022): if the answer to `clean` comes back, the patched
activation carried it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.effect import Effect
from clearhead.inspection.intervention import Part, find_site, with_intervention
from clearhead.inspection.trace import Trace


def patch(
    clean: Trace,
    corrupted: Trace,
    layer: int,
    patched_positions: Iterable[int] | None = None,
    part: Part | None = None,
    head: int | None = None,
    *,
    position: int = -1,
) -> Effect:
    """Run on `corrupted` with an activation of `clean`, and return the effect on the prediction at `position`.

    patched_positions: the tokens at which the activation is replaced; None replaces all. part: what is replaced; by
    default the residual stream before the layer, or with `head` the output of that head.
    """
    _check_pair(clean, corrupted)
    length = len(corrupted.tokens)
    position = corrupted.resolve_position(position)
    part = part or ("residual" if head is None else "attention")
    activation = read_activation(clean, layer, part, head)
    numbers = (
        range(length)
        if patched_positions is None
        else [check_index("position", number, length) for number in patched_positions]
    )
    indices = torch.tensor(list(numbers), dtype=torch.long, device=activation.device)
    site = find_site(corrupted, layer, part, head)
    patched = with_intervention(
        corrupted.require_network(), site, lambda x: x.index_copy(1, indices, activation[:, indices])
    )
    after = corrupted.rerun(position, patched)
    return Effect.from_logits(corrupted.logits_at(position), after)


def patch_grid(clean: Trace, corrupted: Trace, token: int, *, position: int = -1) -> Tensor:
    """Patch the residual stream at each layer and token in turn; return the log-probability gains of `token` (L, T)."""

    def gain(layer: int, patched_position: int) -> float:
        return patch(clean, corrupted, layer, [patched_position], position=position).gain(token)

    layers, positions = range(corrupted.num_layers), range(len(corrupted.tokens))
    return torch.tensor([[gain(layer, patched_position) for patched_position in positions] for layer in layers])


def read_activation(trace: Trace, layer: int, part: Part, head: int | None) -> Tensor:
    """Return the value at a site in the traced run."""
    if part == "residual" and head is None:
        return trace.residual(trace.resolve_layer(layer, None)[1])[None]
    values: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        values.append(x)
        return x

    trace.rerun(-1, with_intervention(trace.require_network(), find_site(trace, layer, part, head), keep))
    return values[0]


def _check_pair(clean: Trace, corrupted: Trace) -> None:
    """Raise ClearheadError unless both traces are of the same network and length."""
    if clean.network is not corrupted.network:
        raise ClearheadError("the two traces are of different models; trace both texts with the same model")
    if len(clean.tokens) != len(corrupted.tokens):
        raise ClearheadError(
            f"the texts have {len(clean.tokens)} and {len(corrupted.tokens)} tokens; patching needs equal lengths"
        )
