"""Simulation of a run: the real network on the meta device, under the counter.

    run = simulate(workload); print(len(run.kernels), run.peak_bytes)

Two things do not exist on the meta device and are replaced: fused attention, which only real devices have, and the
selection of experts, which depends on data and is assumed to be uniform.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from clearhead.costs.formulas import DeviceType, Workload, expected_experts, has_fused_kernel
from clearhead.costs.simulation.counter import KernelCounter, bytes_moved
from clearhead.costs.simulation.cuda_graph import simulate_graph
from clearhead.costs.simulation.workload_steps import build_network, prepare_step, uses_cuda_graph
from clearhead.model import Scoring, fused_attention


def simulate(workload: Workload, max_experts: int | None = None) -> KernelCounter:
    """Run one step of a workload on the meta device and return what it runs.

    max_experts: run at most this many experts of a mixture. That is faster and correct for memory only. In training
    these experts share all tokens, since everything that is saved for the backward counts; otherwise each expert gets
    its own part of the tokens and frees its activations before the next one runs.
    """
    if uses_cuda_graph(workload):
        return simulate_graph(workload)
    network = build_network(workload, "meta")
    counter = _MetaCounter(max_experts, is_training=workload.phase == "train")

    def kernel(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        with _FusedAttentionMode(workload.device_type, counter):
            return fused_attention(q, k, v, scoring)

    with torch.device("meta"), counter:
        step = prepare_step(network, workload, kernel)
        counter.restart()
        step()
    return counter


class _MetaCounter(KernelCounter):
    """A counter that answers the two operations of a mixture whose results depend on data."""

    def __init__(self, max_experts: int | None, is_training: bool) -> None:
        super().__init__()
        self.max_experts, self.is_training = max_experts, is_training
        self.num_experts = 0
        self.tokens_per_expert: Iterator[int] = iter(())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out: Any
        match func.overloadpacket.__name__:
            case "_unique2":  # the experts that any token has selected
                num_tokens, num_chosen = args[0].shape
                num_selected = expected_experts(self.num_experts, num_chosen, num_tokens)
                num_run = min(num_selected, self.max_experts or num_selected)
                num_parts = num_run if self.is_training else num_selected
                self.tokens_per_expert = _split_evenly(num_tokens * num_chosen, num_parts)
                out = torch.arange(num_run, device="cpu"), args[0].new_empty(0), args[0].new_empty(0)
            case "nonzero":  # the tokens that have selected one expert
                out = args[0].new_empty((next(self.tokens_per_expert), args[0].ndim), dtype=torch.int64)
            case name:
                if name == "topk":  # the last one is the router's; the selection of expert groups comes before it
                    self.num_experts = args[0].shape[-1]
                return super().__torch_dispatch__(func, types, args, kwargs)
        self.record(func, args, kwargs or {}, out)
        return out


def _split_evenly(total: int, num_parts: int) -> Iterator[int]:
    return (total * (part + 1) // num_parts - total * part // num_parts for part in range(num_parts))


class _FusedAttentionMode(TorchFunctionMode):
    """Replace scaled_dot_product_attention where the real device would run a fused kernel."""

    def __init__(self, device_type: DeviceType, counter: KernelCounter):
        super().__init__()
        self.device_type, self.counter = device_type, counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or not self._is_fused(*args, **kwargs):
            return func(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(args[0].dtype)
        is_causal = kwargs.get("is_causal", False)
        return _SimulatedAttention.apply(*args[:3], mask, is_causal, self.counter)  # type: ignore[no-untyped-call]

    def _is_fused(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
        mask = options.get("attn_mask")
        return has_fused_kernel(
            self.device_type,
            query.shape[-1],
            value.shape[-1],
            dropout=options.get("dropout_p", 0.0),
            needs_bias_gradient=mask is not None and mask.requires_grad,
        )


class _SimulatedAttention(torch.autograd.Function):
    """Return what the fused kernel returns, save what it saves, and record it in the counter."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, counter: KernelCounter
    ) -> Tensor:
        """Allocate the output and the log-sum-exp of each query."""
        is_same_width = query.shape[-1] == value.shape[-1]
        # The output has the query's layout, so that heads that were split from (B, T, N·H) merge without a copy.
        out = torch.empty_like(query) if is_same_width else query.new_empty(*query.shape[:3], value.shape[-1])
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.counter, ctx.options = counter, {"attn_mask": mask, "is_causal": causal}
        record_attention(counter, "_scaled_dot_product_flash_attention", ctx.options, query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Allocate the gradients of queries, keys and values."""
        query, key, value, out, _ = ctx.saved_tensors
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        name, others = "_scaled_dot_product_flash_attention_backward", (gradient, out, *gradients)
        record_attention(ctx.counter, name, ctx.options, query, key, value, *others)
        return *gradients, None, None, None


def record_attention(
    counter: KernelCounter, name: str, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> None:
    mask = [] if options["attn_mask"] is None else [options["attn_mask"]]
    num_bytes = bytes_moved(name, [q, k, v, *mask], list(others))
    counter.record_attention(name, num_bytes, options | {"query": q, "key": k, "value": v})
