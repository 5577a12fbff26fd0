"""The kernels of a run that never takes place: the real network on the meta device, under the counter.

    counter = lay_out(workload); print(len(counter.kernels), counter.peak_bytes)

Two things cannot happen on the meta device and are stood in for: the fused attention, which exists only on real
ones, and the choice of experts, which is taken to be even.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from clearhead.costs.formulas.operations import num_visited
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.simulation.counter import Counter, bytes_moved
from clearhead.costs.simulation.graphed import lay_out_graph
from clearhead.costs.simulation.workload_steps import build, in_graph, prepare
from clearhead.model import Scoring, fused_attention


def lay_out(workload: Workload, experts_at_most: int | None = None) -> Counter:
    """`experts_at_most`: of a mixture only so many are run, which is sooner, and tells of memory alone.

    In training they share all tokens, since all that is kept for the backward counts. Otherwise each has its own share
    of them, and lets go of it before the next.
    """
    if in_graph(workload):
        return lay_out_graph(workload)
    network = build(workload, "meta")
    counter = MetaCounter(experts_at_most, keeps=workload.phase == "train")

    def kernel(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> Tensor:
        with FusedAttention(workload.device_type, counter):
            return fused_attention(q, k, v, how)

    with torch.device("meta"), counter:
        step = prepare(network, workload, kernel)
        counter.restart()
        step()
    return counter


class MetaCounter(Counter):
    """Answers what depends on data: which experts are chosen, and by which rows."""

    def __init__(self, experts_at_most: int | None, keeps: bool) -> None:
        super().__init__()
        self.experts_at_most, self.keeps = experts_at_most, keeps
        self.num_experts = 0
        self.shares: Iterator[int] = iter(())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out: Any
        match func.overloadpacket.__name__:
            case "_unique2":  # the experts that some row has chosen
                num_tokens, num_chosen = args[0].shape
                visited = num_visited(self.num_experts, num_chosen, num_tokens)
                run = min(visited, self.experts_at_most or visited)
                self.shares = even_shares(num_tokens * num_chosen, run if self.keeps else visited)
                out = torch.arange(run, device="cpu"), args[0].new_empty(0), args[0].new_empty(0)
            case "nonzero":  # where one expert is chosen
                out = args[0].new_empty((next(self.shares), args[0].ndim), dtype=torch.int64)
            case name:
                if name == "topk":  # of a router; that of its groups comes before
                    self.num_experts = args[0].shape[-1]
                return super().__torch_dispatch__(func, types, args, kwargs)
        self.note(func, args, kwargs or {}, out)
        return out


def even_shares(total: int, parts: int) -> Iterator[int]:
    return (total * (part + 1) // parts - total * part // parts for part in range(parts))


class FusedAttention(TorchFunctionMode):
    """In place of scaled_dot_product_attention, where the real device would fuse it."""

    def __init__(self, device_type: str, counter: Counter):
        super().__init__()
        self.device_type, self.counter = device_type, counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention or not self.fuses(*args, **kwargs):
            return func(*args, **kwargs)
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -torch.inf).to(args[0].dtype)
        causal = kwargs.get("is_causal", False)
        return StandIn.apply(*args[:3], mask, causal, self.counter)  # type: ignore[no-untyped-call]

    def fuses(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> bool:
        mask = how.get("attn_mask")
        if mask is not None and mask.requires_grad:
            return False
        return self.device_type != "cpu" or (query.shape[-1] == value.shape[-1] and not how.get("dropout_p"))


class StandIn(torch.autograd.Function):
    """Takes and gives what the fused kernel does, keeps what it keeps, and tells the counter."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, counter: Counter
    ) -> Tensor:
        same_width = query.shape[-1] == value.shape[-1]
        # In the layout of the query, so that heads which were split from (B, T, N·H) merge without a copy.
        out = torch.empty_like(query) if same_width else query.new_empty(*query.shape[:3], value.shape[-1])
        log_sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.counter, ctx.how = counter, {"attn_mask": mask, "is_causal": causal}
        tell(counter, "_scaled_dot_product_flash_attention", ctx.how, query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, _ = ctx.saved_tensors
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        moved = (gradient, out, *gradients)
        tell(ctx.counter, "_scaled_dot_product_flash_attention_backward", ctx.how, query, key, value, *moved)
        return *gradients, None, None, None


def tell(counter: Counter, name: str, how: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> None:
    mask = [] if how["attn_mask"] is None else [how["attn_mask"]]
    moved = bytes_moved(name, [q, k, v, *mask], list(more))
    counter.attention(name, moved, how | {"query": q, "key": k, "value": v})
