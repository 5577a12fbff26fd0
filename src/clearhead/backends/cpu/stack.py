"""A decoder that runs new tokens in the C++ kernels: same modules, same cache, one call for all layers.

    accelerate(network)      # in place; network(...), decode(network, ...) and beam search need no change

Calls that the kernels do not support (without a cache, or a prompt into a sliding cache) run in the modules, which are
also the reference that the kernels are tested against. Changes of weights, modules or hooks, and kernels whose
compilation has finished, take effect when a sequence begins or several tokens are processed at once, not between two
single tokens of one sequence.
"""

from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.backends.cpu.plan import Plan
from clearhead.backends.cpu_kernels import (
    cpu_attention,
    find_new_kernels,
    kernels_support_prompts,
    load_kernel_library,
)
from clearhead.backends.live_checks import (
    can_be_planned,
    packed_tokens_run_in_cpu_kernels,
    runs_in_cpu_kernels,
    unsupported_network_reason,
)
from clearhead.backends.memory import return_freed_memory
from clearhead.backends.modules import AcceleratedHead
from clearhead.cache import KeyValueCache, PackedCache, PagedEncoderOutput
from clearhead.model import EncoderOutput, LayerStack, LogitHead, Transformer, check_shapes, fused_attention

_STEP_LOCK = Lock()  # a plan's structures are overwritten for every token, and a step uses all cores anyway


def accelerate(network: Transformer, build: bool = True, *, later: bool = False) -> bool:
    """Let the decoder run in the C++ kernels, in place, and return whether the kernels support it.

    An unsupported network stays unchanged. With `build`, compile the kernels if they are not on disk. With `later`,
    they may still be missing: the modules compute until they are there.
    """
    stack = network.decoder
    if stack is None or unsupported_network_reason(network, "cpu"):
        return False
    if (load_kernel_library(build=True) if build else find_new_kernels()) is None and not later:
        return False
    if not isinstance(stack, AcceleratedStack):
        network.decoder = AcceleratedStack(stack)
        head: nn.Module | None = network.head
        if isinstance(head, LogitHead):
            network.head = AcceleratedHead(head, head.weight)  # type: ignore[assignment]
    return True


def has_independent_rows(network: Transformer, page_size: int) -> bool:
    """Return whether the kernels compute packed tokens so that the bits of each depend on its own sequence alone.

    That takes AVX-512, and a decoder and a head that the kernels compute as a whole. The encoder of an encoder-decoder
    runs in its modules, whose bits depend on the other sources that are read with one.
    """
    stack, head = network.decoder, cast(nn.Module, network.head)
    if not isinstance(stack, AcceleratedStack) or not isinstance(head, AcceleratedHead):
        return False
    is_product = isinstance(head.transform, nn.Identity) and head.config.softcap is None
    if not is_product or stack.training or find_new_kernels() is None:
        return False
    return packed_tokens_run_in_cpu_kernels(stack, page_size) and can_be_planned(stack)


class AcceleratedStack(LayerStack):
    """A LayerStack that shares the modules of another one and runs calls with a cache in the kernels."""

    def __init__(self, stack: LayerStack):
        nn.Module.__init__(self)
        self.stack, self.width, self.training = stack.stack, stack.width, stack.training
        self.embedding, self.layers = stack.embedding, stack.layers
        self.final_norm, self.relative_bias = stack.final_norm, stack.relative_bias
        self.plan: Plan | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> "AcceleratedStack":
        self.plan = None  # it points to tensors that may move
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A copy has its own tensors, and a plan cannot be pickled.
        return {**super().__getstate__(), "plan": None}  # type: ignore[no-untyped-call]

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        encoder_output: EncoderOutput | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return the last hidden states (B, T, D), from the kernels if they can compute this call."""
        if torch.compiler.is_compiling():  # a compiler can trace the modules only
            return super().forward(
                tokens, attention_mask, position_ids, encoder_output=encoder_output, cache=cache, **options
            )
        kernels = load_kernel_library() if _continues(tokens, cache) else find_new_kernels()
        supported = kernels is not None and position_ids is None
        if supported and runs_in_cpu_kernels(self, tokens, attention_mask, encoder_output, cache, options):
            with _STEP_LOCK:
                if plan := self.plan_for(tokens, cache):
                    return self.run_plan(plan, tokens, attention_mask, encoder_output, cache)
        if options.get("kernel", fused_attention) is fused_attention and kernels_support_prompts():
            options["kernel"] = cpu_attention
        return super().forward(
            tokens, attention_mask, position_ids, encoder_output=encoder_output, cache=cache, **options
        )

    def plan_for(self, tokens: Tensor, cache: KeyValueCache | PackedCache) -> Plan | None:
        """Return the plan for a call.

        Re-checking the modules for every token cost up to 10 % of a step, so the plan is reused within a sequence.
        """
        last_writer = cache.storage.last_writer if isinstance(cache, PackedCache) else cache.last_writer
        if self.plan is not None and last_writer is self.plan.writer and _continues(tokens, cache):
            return self.plan
        return self.current_plan()

    def current_plan(self) -> Plan | None:
        """Return a plan that matches the modules as they are now, or None if the kernels cannot compute them."""
        if self.plan is None or not self.plan.detector.unchanged():
            self.plan = None
            if can_be_planned(self):
                # Merged weights stay trainable, unless they were created in inference mode.
                with torch.inference_mode(next(self.layers.parameters()).is_inference()), torch.no_grad():
                    self.plan = Plan(self)
                return_freed_memory()  # the unmerged weights were freed
        return self.plan

    def run_plan(
        self,
        plan: Plan,
        tokens: Tensor,
        attention_mask: Tensor | None,
        encoder_output: EncoderOutput | None,
        cache: KeyValueCache | PackedCache,
    ) -> Tensor:
        """Run new tokens (B, T) in the kernels and return hidden states (B, T, D) in float32."""
        check_shapes(tokens, attention_mask=attention_mask)
        positions = cache.prepare(tokens, attention_mask)
        self.embedding.check_ranges(tokens, positions, None)
        x = self.embedding(tokens, positions, None).float().contiguous()
        if isinstance(cache, PackedCache):
            assert encoder_output is None or isinstance(encoder_output, PagedEncoderOutput)
            plan.run_packed(x, encoder_output, cache)
            cache.storage.last_writer = plan.writer
        else:
            plan.run(x, positions, encoder_output, cache)
            cache.last_writer = plan.writer
        return x


def _continues(tokens: Tensor, cache: Any) -> bool:
    """Return whether a call adds one token to every sequence, and no sequence begins with it."""
    if isinstance(cache, PackedCache):
        return cache.has_single_tokens and cache.storage.last_writer is not None
    return isinstance(cache, KeyValueCache) and tokens.shape[-1] == 1 and cache.length > 0
