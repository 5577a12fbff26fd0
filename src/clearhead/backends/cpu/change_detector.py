"""Detect changes to the modules of a stack, after which a plan built from them is no longer valid.

detector = ChangeDetector(stack); detector.unchanged()
"""

import operator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from clearhead.backends.live_checks import dropout_modules, hooks_of, planned_modules
from clearhead.model import LayerStack


class ChangeDetector:
    """A snapshot of the modules, parameters and hooks of a stack's layers and final norm."""

    def __init__(self, stack: LayerStack):
        modules = planned_modules(stack)
        owned: list[tuple[dict[str, Any], ...]] = [
            (module._modules, module._parameters, module._buffers) for module in (stack, *modules)
        ]
        self.dictionaries = [part for parts in owned for part in parts if part]
        self.hooks = hooks_of(modules)
        self.dropout_modules = dropout_modules(modules)
        self.members = self.current_members()
        self.tensors = [member for member in self.members if isinstance(member, Tensor)]
        self.versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]
        # References to the memory: otherwise another tensor could be allocated at the same address unnoticed.
        self.references = [tensor.detach() for tensor in self.tensors]
        self.state = self.current_state()

    def unchanged(self) -> bool:
        """Return whether no module or tensor was replaced or changed in place, no hook added and no dropout activated.

        This takes 0.1 ms for 30 layers, and 1 ms between tokens, when the weights have evicted everything else from
        the processor's caches.
        """
        members = self.current_members()
        same = len(members) == len(self.members) and all(map(operator.is_, members, self.members))
        inactive = not any(self.hooks) and not any(module.training for module in self.dropout_modules)
        return same and inactive and self.current_state() == self.state

    def current_members(self) -> list[nn.Module | Tensor | None]:
        """Return all submodules, parameters and buffers in order."""
        return list(chain.from_iterable(map(dict.values, self.dictionaries)))

    def current_state(self) -> tuple[list[int], list[int]]:
        """Return the addresses of all tensors and their counts of in-place changes."""
        return [tensor.data_ptr() for tensor in self.tensors], [tensor._version for tensor in self.versioned]
