"""A counter of what PyTorch runs: FLOPs, bytes, kernels and live memory, operation by operation.

    with KernelCounter() as counter: network(tokens)
    print(counter.flops, counter.peak_bytes)

The counter works below autograd, so it sees the backward too. It knows the fused attention of the CPU, which
torch.utils.flop_counter counts as zero (torch 2.13). On the meta device it counts a run without any data.
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

# Indices of the two matrices among the arguments.
_MATRIX_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
_WITHOUT_KERNEL = (
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_strided",
    "_unsafe_view",
    "detach",
    "lift_fresh",
)
_GATHERS = ("embedding", "index", "index_select", "gather")  # read as much as they write, not the whole table
_SCATTERS = ("index_put_", "index_put", "_index_put_impl_")
_COPIES = ("copy_", "_to_copy")  # elementwise too, although torch does not tag them as pointwise
_ALIGNED_BYTES = 16  # the widest load of a GPU; matrices whose rows start at other addresses need slower kernels


@dataclass(frozen=True)
class Kernel:
    """One operation that moves data."""

    name: str
    num_bytes: int
    flops: int = 0
    shape: tuple[int, int, int, int] | None = None  # matrix product: number of products, m, n, k
    attention_shape: tuple[int, int, int] | None = None  # T, S, H
    uneven_axes: str = ""  # matrix product: axes among m, n, k along which rows start at unaligned addresses
    num_scattered: int = 0  # elements written by an elementwise kernel whose operands have different layouts
    width: int = 1  # elements in a row of the first operand
    num_dispatches: int = 0  # operations that the host had dispatched when it launched this kernel

    @property
    def kind(self) -> str:
        """The name under which the host time of this kernel is calibrated."""
        return "attention" if self.attention_shape is not None else self.name


class KernelCounter(TorchDispatchMode):
    """Record every kernel that runs inside the context, and the memory of the tensors created there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.num_dispatches = 0  # includes views and allocations, which take time on the host only
        self.in_graph = False  # a CUDA graph launches its kernels without the host
        self.allowed_flops = 0
        self.live_bytes = 0  # tensors created inside the context and not yet freed
        self.peak_bytes = 0
        self.saved_bytes: int | None = None  # live when the backward started
        self.live_storages: set[int] = set()

    def restart(self) -> None:
        """Forget the kernels recorded so far; live tensors remain counted."""
        self.kernels, self.num_dispatches, self.allowed_flops = [], 0, 0
        self.peak_bytes, self.saved_bytes = self.live_bytes, None

    @property
    def flops(self) -> int:
        """FLOPs of all matrix products and fused attentions."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def num_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(kernel.num_bytes for kernel in self.kernels)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.record(func, args, kwargs, out)
        return out

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record one dispatched operation with its arguments and its result."""
        self.num_dispatches += 1
        if self.saved_bytes is None and torch._C._current_graph_task_id() != -1:  # autograd has started a backward
            self.saved_bytes = self.live_bytes
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in input_storages:
                self._track(tensor)
        name = func.overloadpacket.__name__
        if name in _WITHOUT_KERNEL or _is_view(func):
            return
        num_bytes = bytes_moved(name, inputs, outputs)
        if not num_bytes:  # a query about types or sizes
            return
        if name in _MATRIX_PRODUCTS:
            left, right = (args[index] for index in _MATRIX_PRODUCTS[name])
            self._record_product(name, num_bytes, left, right, outputs[0])
        elif name in ("convolution", "convolution_backward"):
            self._record_convolution(name, num_bytes, args, outputs[0])
        elif name.removesuffix("_backward") in _FUSED_ATTENTION:
            named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
            self.record_attention(name, num_bytes, named | kwargs)
        else:
            is_elementwise = name in _COPIES or torch.Tag.pointwise in func.tags
            num_scattered = outputs[0].numel() if is_elementwise and not same_layout([*inputs, *outputs]) else 0
            width = inputs[0].shape[-1] if inputs and inputs[0].ndim else 1
            self._launch(Kernel(name, num_bytes, num_scattered=num_scattered, width=width))

    def record_attention(self, name: str, num_bytes: int, arguments: dict[str, Any]) -> None:
        """Record a fused attention by the arguments of scaled_dot_product_attention.

        FLOPs count all pairs of queries and keys, allowed FLOPs those that the mask allows. A backward recomputes the
        scores.
        """
        query, key, value = arguments["query"], arguments["key"], arguments["value"]
        batch, num_heads, num_queries, width = query.shape
        num_keys, value_width = key.shape[2], value.shape[3]
        num_pairs = batch * num_heads * num_queries * num_keys
        per_pair = 3 * width + 2 * value_width if name.endswith("_backward") else width + value_width
        mask = arguments.get("attn_mask", arguments.get("attn_bias"))
        num_allowed = num_pairs if mask is None else _count_allowed(mask, num_pairs)
        if arguments.get("is_causal"):
            num_allowed = num_pairs * (num_keys + 1) // (2 * num_keys)
        shape = (num_queries, num_keys, width)
        self._launch(Kernel(name, num_bytes, 2 * num_pairs * per_pair, attention_shape=shape))
        self.allowed_flops += 2 * num_allowed * per_pair

    def _record_product(self, name: str, num_bytes: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        batch = left.shape[0] if left.ndim == 3 else 1
        shape = (batch, left.shape[-2], right.shape[-1], left.shape[-1])
        flops = 2 * math.prod(shape)
        self._launch(Kernel(name, num_bytes, flops, shape=shape, uneven_axes=_find_uneven_axes(left, right, out)))
        self.allowed_flops += flops

    def _record_convolution(self, name: str, num_bytes: int, args: tuple[Any, ...], out: Tensor) -> None:
        """Record a convolution: each output is a sum over one row of weights. A backward has a product per gradient."""
        is_backward = name == "convolution_backward"
        outputs, weight = (args[0], args[2]) if is_backward else (out, args[1])
        num_products = sum(args[-1][:2]) if is_backward else 1  # gradients of the input and of the weight, if asked for
        flops = 2 * outputs.numel() * weight[0].numel() * num_products
        self._launch(Kernel(name, num_bytes, flops))
        self.allowed_flops += flops

    def _launch(self, kernel: Kernel) -> None:
        self.kernels.append(replace(kernel, num_dispatches=self.num_dispatches))

    def _track(self, tensor: Tensor) -> None:
        """Count a new storage until it is freed."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self.live_storages:
            return
        self.live_storages.add(address)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, address, num_bytes)

    def _release(self, address: int, num_bytes: int) -> None:
        self.live_storages.discard(address)
        self.live_bytes -= num_bytes


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def bytes_moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Return the bytes that an operation reads and writes: each operand once, without the repeats of expanded ones."""
    if name in _GATHERS:
        return 2 * total_bytes(outputs)
    if name in _SCATTERS:
        return 2 * tensor_bytes(inputs[-1])
    if name == "nll_loss_forward":  # reads one log-probability per row
        return total_bytes(inputs[1:]) + total_bytes(outputs) + len(inputs[0]) * inputs[0].element_size()
    if name == "nll_loss_backward":  # reads no log-probabilities
        return total_bytes(inputs) - tensor_bytes(inputs[1]) + total_bytes(outputs)
    if name == "copy_":
        return tensor_bytes(inputs[0]) + tensor_bytes(inputs[1])
    return total_bytes(inputs) + total_bytes(outputs)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor_bytes(tensor) for tensor in tensors)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, at most those of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def same_layout(tensors: list[Tensor]) -> bool:
    """Return whether all tensors have the same shape and strides, so that one index serves all; scalars need none."""
    return len({(tensor.shape, tensor.stride()) for tensor in tensors if tensor.numel() > 1}) <= 1


def _find_uneven_axes(left: Tensor, right: Tensor, out: Tensor) -> str:
    """Return the axes among m, n and k along which some matrix has rows that start at unaligned addresses."""
    axes = set()
    for matrix, (row_axis, column_axis) in ((left, "mk"), (right, "kn"), (out, "mn")):
        is_transposed = matrix.stride(-1) != 1
        rows, step = (-1, matrix.stride(-1)) if is_transposed else (-2, matrix.stride(-2))
        if matrix.shape[rows] > 1 and step * matrix.element_size() % _ALIGNED_BYTES:
            axes.add(row_axis if is_transposed else column_axis)
    return "".join(sorted(axes))


def _count_allowed(mask: Tensor, num_pairs: int) -> int:
    """Return how many pairs a mask allows: True in a boolean mask, above -∞ in an additive one, all on meta."""
    if mask.is_meta:
        return num_pairs
    allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
    return int(allowed.expand_as(mask).sum()) * num_pairs // mask.numel()
