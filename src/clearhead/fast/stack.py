"""A decoder whose single steps run in the processor's kernels: the same modules, the same cache, one call for a token.

    accelerate(network)      # in place; network(...), decode(network, ...) and beam search stay as they are

Many tokens at once (a prompt) go through the modules themselves, which are also the oracle of the step.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.cache.cache import KeyValueCache
from clearhead.fast import cpu
from clearhead.fast.modules import FastHead
from clearhead.fast.plan import Plan
from clearhead.fast.support import unknown_part
from clearhead.model.attend import fused
from clearhead.model.embedding import LogitHead
from clearhead.model.transformer import LayerStack, Memory, Transformer


def accelerate(network: Transformer, build: bool = True) -> bool:
    """Let the decoder step in the kernels, in place; False where it cannot, and the network stays as it is."""
    stack = network.decoder
    if stack is None or why_not(network) or cpu.library(build=build) is None:
        return False
    if not isinstance(stack, FastStack):
        network.decoder = FastStack(stack)
        head: nn.Module | None = network.head
        if isinstance(head, LogitHead):
            network.head = FastHead(head, head.weight)  # type: ignore[assignment]
    return True


def why_not(network: Transformer) -> str | None:
    """What the kernels do not know of this model, in a few words."""
    stack, parameter = network.decoder, next(network.parameters())
    if stack is None:
        return "an encoder alone does not decode"
    if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return f"{parameter.dtype} on {parameter.device.type}"
    return next((reason for layer in stack.stack.layers if (reason := unknown_part(layer))), None)


class FastStack(LayerStack):
    def __init__(self, stack: LayerStack):
        nn.Module.__init__(self)
        self.stack, self.width = stack.stack, stack.width
        self.embedding, self.layers = stack.embedding, stack.layers
        self.final_norm, self.relative_bias = stack.final_norm, stack.relative_bias
        self.plan: Plan | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "FastStack":
        self.plan = None  # it points into tensors that may move
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        memory: Memory | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Tensor:
        few = tokens.shape[1] == 1 and len(tokens) <= cpu.MAX_ROWS
        plain = options.get("kernel", fused) is fused and tokens.device.type == "cpu"
        remembered = memory is None or memory.remembered is not None
        if not (few and plain and remembered and isinstance(cache, KeyValueCache) and positions is None):
            return super().forward(tokens, mask, positions, memory=memory, cache=cache, **options)
        return self.step(tokens, mask, memory, cache)

    @torch.no_grad()
    def step(self, tokens: Tensor, mask: Tensor | None, memory: Memory | None, cache: KeyValueCache) -> Tensor:
        """One token of each row (B, 1) -> (B, 1, D), in the precision of the weights' sums: float32."""
        self.plan = self.plan or Plan(self.layers, self.final_norm)
        positions = cache.begin(tokens, mask)
        self.embedding.check(tokens, positions, None)
        x = self.embedding(tokens, positions, None).float().contiguous()
        self.plan.run(x, positions, memory, cache)
        return x
