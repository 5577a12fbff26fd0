"""Measures this machine: bandwidth by size, rates of products and attention by shape, what an operation costs.

    calibration = measure_machine("cuda")

Weights are taken in turn from more memory than any cache holds, as a network's are. On CUDA kernels run from a graph,
so that the host does not hold them up; what the host costs is measured apart (host.py). A processor is measured several
times over: products on a shared one were seen to take 1.4 times as long for seconds (benchmarks/README.md).
"""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from clearhead.costs.calibration.calibration import Calibration, Rate, Traffic, fastest, machine_name
from clearhead.costs.calibration.clock import POINT_SECONDS, Run, clock, measured, seconds_of
from clearhead.costs.calibration.gpu_rates import measure_choice, measure_passes, measure_scattered, measure_uneven
from clearhead.costs.calibration.graph_rates import (
    measure_moments,
    measure_row_attention,
    measure_row_products,
    measure_start,
)
from clearhead.costs.calibration.host import host_seconds
from clearhead.costs.calibration.packed_rates import FORMATS, measure_packed
from clearhead.costs.formulas.workload import Phase
from clearhead.errors import ClearheadError, unknown_name

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}  # what fits in a minute
NUM_PASSES = {"cpu": 3, "cuda": 1}
# Sides of the products: rows m, outputs n, inputs k. Each grid ends where larger products are no faster.
GRIDS = {
    "cpu": ((1, 8, 64, 128, 256, 512), (128, 512, 2048), (128, 512, 2048)),
    "cuda": ((1, 8, 64, 512, 4096, 16384), (128, 512, 2048, 8192, 32768), (128, 512, 2048, 8192)),
}
LENGTHS = {"cpu": (1, 32, 128, 512, 2048), "cuda": (1, 128, 512, 2048, 8192)}
HEAD_WIDTHS = (64, 128)
MOST_HEADS = {"cpu": 64, "cuda": 8192}  # on a GPU a backward is to outlast the host's work for it
TRAFFIC_BYTES = tuple(1 << power for power in (14, 17, 20, 22, 24, 26, 28))
MOST_COPIES = 1000
ROUND_FLOPS = {
    "cpu": 10**10,
    "cuda": 10**12,
}  # of all copies; then a weight is read so seldom that it may be a warm one
MOST_SCORES = {"cpu": 1 << 22, "cuda": 1 << 29}
COLD_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
OPTIMIZED = {"cpu": (16, 1024), "cuda": (64, 2048)}  # square matrices: how many, of which side

Tell = Callable[[str], object]


def measure_machine(device: str, tell: Tell = lambda what: None, dtypes: Sequence[str] | None = None) -> Calibration:
    if device not in ("cpu", "cuda"):
        raise unknown_name("device to measure", device, ["cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ClearheadError("there is no CUDA device here; run: clearhead calibrate --device cpu")
    dtypes = DTYPES[device] if dtypes is None else dtypes
    found = fastest([measure_once(device, tell, dtypes) for _ in range(NUM_PASSES[device])])
    if device == "cuda":
        return found
    tell("packed weights")
    return replace(found, packed={quant: measure_packed(quant) for quant in FORMATS})


def measure_once(device: str, tell: Tell, dtypes: Sequence[str]) -> Calibration:
    with torch.no_grad():
        tell("bandwidth")
        traffic = [measure_traffic(device, size) for size in TRAFFIC_BYTES]
        tell("matrix products")
        products = {dtype: measure_products(device, dtype) for dtype in dtypes}
        tell("attention")
        attention = {dtype: measure_attention(device, dtype, backward=False) for dtype in dtypes}
    backward = {dtype: measure_attention(device, dtype, backward=True) for dtype in dtypes}
    found = measure_gpu(tell, dtypes) if device == "cuda" else {}
    tell("what an operation costs")
    return Calibration(
        device=device,
        machine=machine_name(device),
        torch=torch.__version__,
        memory_bytes=encoder_output_of(device),
        traffic=traffic,
        products=products,
        attention=attention,
        attention_backward=backward,
        optimizer={dtype: measure_optimizer(device, dtype) for dtype in dtypes},
        kernel_seconds=shortest_kernel(device),
        host_seconds={phase: host_seconds(device, phase) for phase in get_args(Phase)},
        **found,
    )


@torch.no_grad()
def measure_gpu(tell: Tell, dtypes: Sequence[str]) -> dict[str, Any]:
    """What makes no difference on a CPU, or does not exist there."""
    tell("kernels in awkward places")
    found: dict[str, Any] = {
        "uneven": {dtype: measure_uneven("cuda", dtype) for dtype in dtypes},
        "scattered_per_second": next(iter(measured([partial(measure_scattered, "cuda")])), None),
        "chosen_per_second": measure_choice("cuda"),
    }
    tell("kernels of a decoded token")
    found["graph_seconds"] = measure_start()
    found["passes"] = measure_passes("cuda") | {"moments": measure_moments(dtypes[0])}
    found["row_products"] = {dtype: measure_row_products(dtype) for dtype in dtypes}
    found["row_attention"] = {dtype: measure_row_attention(dtype) for dtype in dtypes}
    torch.cuda.empty_cache()
    return found


def measure_traffic(device: str, num_bytes: int) -> Traffic:
    """One number read for each one written. On a CPU less what an operation costs however small it is."""
    copies = max(1, min(MOST_COPIES, COLD_BYTES[device] // num_bytes))
    seconds = scaling_seconds(device, num_bytes, copies)
    if device == "cpu":
        seconds = max(seconds - scaling_seconds(device, 8, 1), seconds / 10)
    return Traffic(num_bytes, num_bytes / seconds)


def scaling_seconds(device: str, num_bytes: int, copies: int) -> float:
    sources = torch.ones(copies, num_bytes // 8, device=device)
    targets = torch.empty_like(sources)
    pairs = zip(sources, targets, strict=True)
    return seconds_of([partial(torch.mul, source, 2.0, out=target) for source, target in pairs], device)


def measure_optimizer(device: str, dtype: str) -> float:
    """Bytes of parameters that a fused AdamW brings up to date in a second."""
    count, side = OPTIMIZED[device]
    parameters = [torch.zeros(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    seconds = clock(optimizer.step, device, POINT_SECONDS[device])
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / seconds


def measure_products(device: str, dtype: str) -> list[Rate]:
    kind = getattr(torch, dtype)
    some = torch.randn(1 << 18, device=device, dtype=kind)
    pool = some.repeat(COLD_BYTES[device] // (some.numel() * kind.itemsize))
    return measured(partial(measure_product, pool, *shape) for shape in itertools.product(*GRIDS[device]))


def measure_product(pool: Tensor, rows: int, outputs: int, inputs: int) -> Rate:
    flops = 2 * rows * outputs * inputs
    copies = max(1, min(MOST_COPIES, pool.numel() // (outputs * inputs), ROUND_FLOPS[pool.device.type] // flops))
    weights = pool[: copies * outputs * inputs].view(copies, outputs, inputs)
    x = torch.randn(rows, inputs, device=pool.device, dtype=pool.dtype)
    runs: list[Run] = [partial(linear, x, weight) for weight in weights]
    return Rate((rows, outputs, inputs), flops / seconds_of(runs, pool.device.type, flops=flops))


def measure_attention(device: str, dtype: str, backward: bool) -> list[Rate]:
    shapes = itertools.product(LENGTHS[device], HEAD_WIDTHS)
    return measured(
        partial(measure_scores, device, dtype, backward, *shape) for shape in shapes if not (backward and shape[0] == 1)
    )


def measure_scores(device: str, dtype: str, backward: bool, length: int, width: int) -> Rate:
    alone = length == 1
    num_keys = 2048 if alone else length
    heads = max(1, min(64 if alone else MOST_HEADS[device], MOST_SCORES[device] // (length * num_keys)))
    flops = round(2 * heads * length * num_keys * 2 * width * (2.5 if backward else 1.0))
    query = torch.randn(1, heads, length, width, device=device, dtype=getattr(torch, dtype))
    # Four query heads to one of keys, as most models have it, and keys from memory, as they come when decoding.
    kv_heads, copies = (heads // 4, 8) if alone else (heads, 1)
    keys = torch.randn(copies, 2, 1, kv_heads, num_keys, width, device=device, dtype=query.dtype)
    runs = [attention_run(query, key, value, backward) for key, value in keys]
    if backward:  # without a graph, so that several must be under way for the host to be ahead
        runs = runs * (1 if device == "cpu" else 8)
    return Rate((length, width), flops / seconds_of(runs, device, graph=not backward, flops=flops))


def attention_run(query: Tensor, key: Tensor, value: Tensor, backward: bool) -> Run:
    attend = partial(
        scaled_dot_product_attention,
        query,
        key,
        value,
        is_causal=query.shape[2] > 1,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if not backward:
        return attend
    for part in (query, key, value):
        part.requires_grad_()
    out = attend()
    return partial(torch.autograd.grad, out, (query, key, value), torch.ones_like(out), retain_graph=True)


def shortest_kernel(device: str) -> float:
    """Of different ones in turn, as they come in a network: a kernel that follows itself starts sooner.

    On the CPU the host's work is all there is to a tiny operation.
    """
    if device == "cpu":
        return 0.0
    tiny = torch.ones(8, 64, device=device)
    kinds: list[Run] = [
        partial(torch.mul, tiny, 2.0),
        partial(torch.add, tiny, tiny),
        partial(torch.rsqrt, tiny),
        partial(torch.mean, tiny, -1),
        partial(tiny.to, torch.bfloat16),
    ]
    return seconds_of(kinds * 20, device)


def encoder_output_of(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
