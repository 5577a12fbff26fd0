"""Counts what PyTorch really runs: FLOPs, bytes, kernels and the memory alive, operation by operation.

    with Counter() as counter: network(tokens)
    print(counter.flops, counter.peak_bytes)

It stands below autograd, so a backward is counted too, and it knows the fused attention of the CPU, which
torch.utils.flop_counter counts as nothing (torch 2.13). On the meta device it counts a run that never takes place.
"""

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
    "_unsafe_view",
    "detach",
    "lift_fresh",
)
GATHERS = ("embedding", "index", "index_select", "gather")  # read as much as they write, not the whole table
SCATTERS = ("index_put_", "index_put", "_index_put_impl_")
COPIES = ("copy_", "_to_copy")  # number by number too, though torch does not call them pointwise
ALIGNED_BYTES = 16  # what a GPU loads at once; matrices whose rows begin elsewhere take slower kernels


@dataclass(frozen=True)
class Kernel:
    """One operation that moves numbers."""

    name: str
    num_bytes: int
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None  # of a product: how many, m, n, k
    attention: tuple[int, int, int] | None = None  # T, S, H
    uneven: str = ""  # sides m, n, k of a product along which some matrix has rows that begin between aligned places
    num_scattered: int = 0  # numbers written whose operands lie differently: each has its address worked out
    width: int = 1  # numbers in a row of its first operand
    num_dispatches: int = 0  # on the host until it was launched

    @property
    def kind(self) -> str:
        return "attention" if self.attention is not None else self.name


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.num_dispatches = 0  # views and allocations too: they cost time on the host alone
        self.in_graph = False  # a CUDA graph launches its kernels itself, without the host
        self.allowed_flops = 0
        self.live_bytes = 0  # of what was made since the counter began
        self.peak_bytes = 0
        self.saved_bytes: int | None = None  # alive when the backward began
        self.alive: set[int] = set()

    def restart(self) -> None:
        """Forget the work so far; what is alive stays counted."""
        self.kernels, self.num_dispatches, self.allowed_flops = [], 0, 0
        self.peak_bytes, self.saved_bytes = self.live_bytes, None

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def num_bytes(self) -> int:
        return sum(kernel.num_bytes for kernel in self.kernels)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.note(func, args, kwargs, out)
        return out

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self.num_dispatches += 1
        if self.saved_bytes is None and torch._C._current_graph_task_id() != -1:
            self.saved_bytes = self.live_bytes
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in given:
                self.hold(tensor)
        name = func.overloadpacket.__name__
        if name in FREE or is_view(func):
            return
        moved = bytes_moved(name, inputs, outputs)
        if not moved:  # a question about types
            return
        if name in PRODUCTS:
            left, right = (args[place] for place in PRODUCTS[name])
            self.product(name, moved, left, right, outputs[0])
        elif name.removesuffix("_backward") in ATTENTION:
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            self.attention(name, moved, named | kwargs)
        else:
            by_number = name in COPIES or torch.Tag.pointwise in func.tags
            scattered = outputs[0].numel() if by_number and not lie_alike([*inputs, *outputs]) else 0
            width = inputs[0].shape[-1] if inputs and inputs[0].ndim else 1
            self.launch(Kernel(name, moved, num_scattered=scattered, width=width))

    def launch(self, kernel: Kernel) -> None:
        self.kernels.append(replace(kernel, num_dispatches=self.num_dispatches))

    def product(self, name: str, num_bytes: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        batch = left.shape[0] if left.ndim == 3 else 1
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
        flops = 2 * math.prod(shape)
        self.launch(Kernel(name, num_bytes, flops, shape=shape, uneven=uneven_sides(left, right, out)))
        self.allowed_flops += flops

    def attention(self, name: str, num_bytes: int, given: dict[str, Any]) -> None:
        """The whole rectangle; of it the mask allows a part. A backward makes the scores again."""
        query, key, value = given["query"], given["key"], given["value"]
        batch, heads, num_queries, width = query.shape
        num_keys, value_width = key.shape[2], value.shape[3]
        pairs = batch * heads * num_queries * num_keys
        per_pair = 3 * width + 2 * value_width if name.endswith("_backward") else width + value_width
        mask = given.get("attn_mask", given.get("attn_bias"))
        allowed = pairs if mask is None else allowed_pairs(mask, pairs)
        if given.get("is_causal"):
            allowed = pairs * (num_keys + 1) // (2 * num_keys)
        kernel = Kernel(name, num_bytes, 2 * pairs * per_pair, attention=(num_queries, num_keys, width))
        self.launch(kernel)
        self.allowed_flops += 2 * allowed * per_pair

    def hold(self, tensor: Tensor) -> None:
        """Count a new storage until nobody holds it."""
        storage = tensor.untyped_storage()
        place, num_bytes = storage._cdata, storage.nbytes()
        if place in self.alive:
            return
        self.alive.add(place)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self.release, place, num_bytes)

    def release(self, place: int, num_bytes: int) -> None:
        self.alive.discard(place)
        self.live_bytes -= num_bytes


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def bytes_moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Each operand once; what an expanded tensor repeats is read from the same place."""
    if name in GATHERS:
        return 2 * total(outputs)
    if name in SCATTERS:
        return 2 * size_of(inputs[-1])
    if name == "nll_loss_forward":  # reads one number of each row
        return total(inputs[1:]) + total(outputs) + len(inputs[0]) * inputs[0].element_size()
    if name == "nll_loss_backward":  # reads none of them
        return total(inputs) - size_of(inputs[1]) + total(outputs)
    if name == "copy_":
        return size_of(inputs[0]) + size_of(inputs[1])
    return total(inputs) + total(outputs)


def total(tensors: Iterable[Tensor]) -> int:
    return sum(size_of(tensor) for tensor in tensors)


def size_of(tensor: Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def lie_alike(tensors: list[Tensor]) -> bool:
    """Whether one address serves for all: the same shape, the same strides. A single number has no address to find."""
    return len({(tensor.shape, tensor.stride()) for tensor in tensors if tensor.numel() > 1}) <= 1


def uneven_sides(left: Tensor, right: Tensor, out: Tensor) -> str:
    found = set()
    for matrix, (down, across) in ((left, "mk"), (right, "kn"), (out, "mn")):
        turned = matrix.stride(-1) != 1
        rows, step = (-1, matrix.stride(-1)) if turned else (-2, matrix.stride(-2))
        if matrix.shape[rows] > 1 and step * matrix.element_size() % ALIGNED_BYTES:
            found.add(down if turned else across)
    return "".join(sorted(found))


def allowed_pairs(mask: Tensor, pairs: int) -> int:
    """True in a mask of bools, more than -∞ in one that is added; a mask of meta tensors allows all."""
    if mask.is_meta:
        return pairs
    seen = mask if mask.dtype == torch.bool else mask > -torch.inf
    return int(seen.expand_as(mask).sum()) * pairs // mask.numel()
