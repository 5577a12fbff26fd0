"""A decoder whose tokens run in the processor's kernels: the same modules, the same cache, one call for all layers.

    accelerate(network)      # in place; network(...), decode(network, ...) and beam search stay as they are

What the kernels do not know (no cache, a prompt into a ring of the last tokens) goes through the modules themselves,
which are also the oracle. Weights, modules or hooks that change are seen when a text begins or several tokens are read,
not between two single tokens of one text.
"""

from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.backends.cpu import library as cpu
from clearhead.backends.cpu.attention import attend
from clearhead.backends.cpu.plan import Plan
from clearhead.backends.lowering import unknown_in
from clearhead.backends.packed.modules import AcceleratedHead
from clearhead.cache import ContiguousStore, KeyValueCache
from clearhead.model import EncoderOutput, LayerStack, LogitHead, Transformer, check_shapes, fused_attention

ONE_AT_A_TIME = Lock()  # a plan's structures are filled anew for every token, and a step uses all cores anyway


def accelerate(network: Transformer, build: bool = True) -> bool:
    """Let the decoder step in the kernels, in place; False where it cannot, and the network stays as it is."""
    stack = network.decoder
    if stack is None or why_no_cpu_kernels(network) or cpu.kernel_library(build=build) is None:
        return False
    if not isinstance(stack, AcceleratedStack):
        network.decoder = AcceleratedStack(stack)
        head: nn.Module | None = network.head
        if isinstance(head, LogitHead):
            network.head = AcceleratedHead(head, head.weight)  # type: ignore[assignment]
    return True


def why_no_cpu_kernels(network: Transformer) -> str | None:
    """What the kernels do not know of this model, in a few words."""
    stack, parameter = network.decoder, next(network.parameters())
    if stack is None:
        return "an encoder alone does not decode"
    if parameter.device.type != "cpu" or parameter.dtype not in (torch.float32, torch.bfloat16):
        return f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}"
    if network.head is not None and network.head.config.transform is not None:
        return "a head with a layer of its own"
    return unknown_in(stack.stack)


def reads_prompts() -> bool:
    """Without large vectors PyTorch's products of many rows are the faster ones."""
    kernels = cpu.kernel_library()
    return kernels is not None and bool(kernels.clearhead_reads_prompts())


class AcceleratedStack(LayerStack):
    def __init__(self, stack: LayerStack):
        nn.Module.__init__(self)
        self.stack, self.width, self.training = stack.stack, stack.width, stack.training
        self.embedding, self.layers = stack.embedding, stack.layers
        self.final_norm, self.relative_bias = stack.final_norm, stack.relative_bias
        self.plan: Plan | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "AcceleratedStack":
        self.plan = None  # it points into tensors that may move
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has tensors of its own, and is not compiled.
        return {**super().__getstate__(), "plan": None}  # type: ignore[no-untyped-call]

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        encoder_output: EncoderOutput | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Tensor:
        if positions is None and self.is_step(tokens, encoder_output, cache, options):
            with ONE_AT_A_TIME:
                if plan := self.plan_for(tokens, cache):
                    return self.step(plan, tokens, mask, encoder_output, cache)
        if options.get("kernel", fused_attention) is fused_attention and reads_prompts():
            options["kernel"] = attend
        return super().forward(tokens, mask, positions, encoder_output=encoder_output, cache=cache, **options)

    def is_step(
        self, tokens: Tensor, encoder_output: EncoderOutput | None, cache: Any, options: dict[str, Any]
    ) -> bool:
        """New tokens of a cache, and nothing else asked for: no gradient, dropout, other kernel or graph."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or tokens.device.type != "cpu":
            return False
        # With grouped attention there is nothing to absorb.
        plain = options.keys() <= {"kernel", "absorb"} and options.get("kernel", fused_attention) is fused_attention
        if not plain or not isinstance(cache, KeyValueCache) or tokens.ndim != 2:
            return False
        one = tokens.shape[1] == 1
        if self.stack.layers[0].cross_attention is not None:
            return (
                one
                and encoder_output is not None
                and encoder_output.cross_keys_values is not None
                and len(encoder_output.states) == len(tokens)
            )
        # A ring gives back a copy of what it keeps when many tokens come at once; the kernels write in place.
        whole = reads_prompts() and all(isinstance(store, ContiguousStore) for store in cache.stores)
        return encoder_output is None and (one or whole)

    def plan_for(self, tokens: Tensor, cache: KeyValueCache) -> Plan | None:
        """To look at the modules for every token took up to a tenth of its time."""
        if self.plan is not None and cache.written_by is self.plan.mark and tokens.shape[1] == 1:
            return self.plan
        return self.current_plan()

    def current_plan(self) -> Plan | None:
        """Of the modules as they stand; None where others have taken their place."""
        if self.plan is None or not self.plan.watch.sees_no_change():
            self.plan = None
            if Plan.suits(self):
                # What is merged stays what it was: weights that can be trained again, unless they never could.
                with torch.inference_mode(next(self.layers.parameters()).is_inference()), torch.no_grad():
                    self.plan = Plan(self)
        return self.plan

    def step(
        self,
        plan: Plan,
        tokens: Tensor,
        mask: Tensor | None,
        encoder_output: EncoderOutput | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """New tokens (B, T) -> (B, T, D), in the precision of the weights' sums: float32."""
        check_shapes(tokens, mask=mask)
        positions = cache.begin(tokens, mask)
        self.embedding.check(tokens, positions, None)
        x = self.embedding(tokens, positions, None).float().contiguous()
        plan.run(x, positions, encoder_output, cache)
        cache.written_by = plan.mark
        return x
