"""Whether a stack's layers are still what they were when a plan was made of them.

watch = Watch(stack); watch.sees_no_change()
"""

import operator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from clearhead.backends.lowering import hooks_of
from clearhead.model import Attention, LayerStack


class Watch:
    def __init__(self, stack: LayerStack):
        modules = planned(stack)
        owned: list[tuple[dict[str, Any], ...]] = [
            (module._modules, module._parameters, module._buffers) for module in (stack, *modules)
        ]
        self.parts = [part for parts in owned for part in parts if part]
        self.hooks = hooks_of(modules)
        self.droppers = droppers_in(modules)
        self.members = self.members_now()
        self.tensors = [member for member in self.members if isinstance(member, Tensor)]
        self.counting = [tensor for tensor in self.tensors if not tensor.is_inference()]  # their changes in place
        self.held = [tensor.detach() for tensor in self.tensors]  # or others could come to stand at these addresses
        self.numbers = self.numbers_now()

    def sees_no_change(self) -> bool:
        """Nothing exchanged, changed in place, hooked into or told to drop out.

        0.1 ms for 30 layers, and 1 ms between tokens, whose weights leave none of this in the processor's caches.
        """
        members = self.members_now()
        same = len(members) == len(self.members) and all(map(operator.is_, members, self.members))
        unheard = not any(self.hooks) and not any(module.training for module in self.droppers)
        return same and unheard and self.numbers_now() == self.numbers

    def members_now(self) -> list[nn.Module | Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self.parts)))

    def numbers_now(self) -> tuple[list[int], list[int]]:
        """Where they stand, and how often they were changed there."""
        return [tensor.data_ptr() for tensor in self.tensors], [tensor._version for tensor in self.counting]


def planned(stack: LayerStack) -> list[nn.Module]:
    """The modules that a plan stands for."""
    return [*stack.layers.modules(), *stack.final_norm.modules()]


def droppers_in(modules: list[nn.Module]) -> list[nn.Module]:
    """They may be in training where the stack is not: dropout at inference tells how sure a model is."""
    return [module for module in modules if isinstance(module, nn.Dropout | Attention)]
