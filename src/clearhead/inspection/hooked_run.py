"""Run a network and read or change its activations by the names of TransformerLens, so that its notebooks work.

    logits, cache = run_with_cache(network, tokens); cache["pattern", 0]
    logits = run_with_hooks(network, tokens, [("blocks.3.attn.hook_z", ablate_head)])

A hook function takes an activation and the point, fn(value, hook), and returns the value to go on with, or None to keep
it. It may change the value in place.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from clearhead.errors import ClearheadError, unknown_name
from clearhead.inspection.activation_cache import ActivationCache
from clearhead.inspection.hook_points import hook_network
from clearhead.inspection.recording import evaluation_mode
from clearhead.model import Transformer


@dataclass(frozen=True)
class HookPoint:
    """The point at which a hook function is called."""

    name: str
    ctx: dict[str, Any] = field(default_factory=dict)  # for notes of the function

    def layer(self) -> int:
        """Return the number of the block of this point."""
        first, _, rest = self.name.partition(".")
        if first != "blocks":
            raise ClearheadError(f"{self.name} belongs to no layer")
        return int(rest.partition(".")[0])


HookFunction = Callable[[Tensor, HookPoint], Tensor | None]
NameFilter = str | Sequence[str] | Callable[[str], bool] | None
Hook = tuple[str | Callable[[str], bool], HookFunction]


def run_with_cache(
    network: Transformer, tokens: Tensor, attention_mask: Tensor | None = None, names_filter: NameFilter = None
) -> tuple[Tensor, ActivationCache]:
    """Return the logits (B, T, V) of tokens (B, T) and the activations whose names pass the filter; None: all.

    Gradients are recorded as PyTorch's grad mode says.
    """
    selects, activations = _selector(names_filter), {}

    def record(name: str, value: Tensor) -> Tensor:
        seen.add(name)
        if selects(name):
            activations[name] = value
        return value

    seen: set[str] = set()
    logits = _run(network, tokens, attention_mask, record)
    _check_names([names_filter] if isinstance(names_filter, str) else names_filter, seen)
    return logits, ActivationCache(activations, len(network.config.output_stack.layers))


def run_with_hooks(
    network: Transformer, tokens: Tensor, fwd_hooks: Iterable[Hook], attention_mask: Tensor | None = None
) -> Tensor:
    """Return the logits (B, T, V) of tokens (B, T) with functions applied to activations.

    fwd_hooks: pairs of a name, or of a function that selects names, and of a hook function.
    """
    hooks = [(name, _selector(name), function) for name, function in fwd_hooks]
    points: dict[str, HookPoint] = {}

    def change(name: str, value: Tensor) -> Tensor:
        point = points.setdefault(name, HookPoint(name))
        for _, selects, function in hooks:
            if selects(name):
                # A clone, because functions usually change a part of the value in place.
                changed = function(value := value.clone(), point)
                value = value if changed is None else changed
        return value

    logits = _run(network, tokens, attention_mask, change)
    _check_names([name for name, _, _ in hooks if isinstance(name, str)], set(points))
    return logits


def _run(
    network: Transformer, tokens: Tensor, attention_mask: Tensor | None, apply: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """Run the copy with hook points once, without dropout."""
    hooked, kernel = hook_network(network, apply)
    with evaluation_mode(hooked):
        logits: Tensor = hooked(tokens, attention_mask, kernel=kernel)
    return logits


def _selector(names: NameFilter) -> Callable[[str], bool]:
    """Return a function that says whether a name is selected."""
    if names is None:
        return lambda name: True
    if callable(names):
        return names
    chosen = {names} if isinstance(names, str) else set(names)
    return lambda name: name in chosen


def _check_names(names: Any, known: set[str]) -> None:
    """Raise ClearheadError if a name is not one of the points that the network passed."""
    if names is None or callable(names):
        return
    for name in names:
        if name not in known:
            raise unknown_name("hook point", name, sorted(known))
