"""Measurement of this machine: bandwidth by size, matrix products and attention by shape, time per operation.

    calibration = measure_machine("cuda")

Weights come in turn from more memory than any cache holds, as those of a network do. On CUDA, kernels run from a graph,
so that the host does not delay them; host time is measured separately (toy_networks.py). A CPU is measured several
times: products on a shared one were seen to take 1.4 times as long for seconds (benchmarks/log.md).
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from clearhead.costs.calibration.gpu_rates import (
    measure_argmax,
    measure_graph_start,
    measure_moments,
    measure_reductions,
    measure_row_attention,
    measure_row_products,
    measure_scattered,
    measure_uneven,
)
from clearhead.costs.calibration.progress import Fields, MeasuredParts, ShowProgress
from clearhead.costs.calibration.rates import (
    Calibration,
    Rate,
    Traffic,
    best_of,
    calibration_from_dict,
    machine_name,
)
from clearhead.costs.calibration.timing import POINT_SECONDS, Run, collect_points, time_runs, time_step
from clearhead.costs.calibration.toy_networks import PACKED_FORMATS, measure_host_seconds, measure_packed
from clearhead.costs.formulas import Phase
from clearhead.errors import ClearheadError, unknown_name

DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}  # what fits into a minute
_NUM_PASSES = {"cpu": 3, "cuda": 1}
# Matrix products: rows m, outputs n, inputs k. Each grid ends where larger products are no faster.
GRIDS = {
    "cpu": ((1, 8, 64, 128, 256, 512), (128, 512, 2048), (128, 512, 2048)),
    "cuda": ((1, 8, 64, 512, 4096, 16384), (128, 512, 2048, 8192, 32768), (128, 512, 2048, 8192)),
}
LENGTHS = {"cpu": (1, 32, 128, 512, 2048), "cuda": (1, 128, 512, 2048, 8192)}
HEAD_WIDTHS = (64, 128)
_MAX_HEADS = {"cpu": 64, "cuda": 8192}  # on a GPU, enough for a backward to take longer than its launch on the host
TRAFFIC_BYTES = tuple(1 << power for power in (14, 17, 20, 22, 24, 26, 28))
MAX_COPIES = 1000
# FLOPs of one round over all copies of a weight. For larger products it does not matter whether a cache holds it.
_ROUND_FLOPS = {"cpu": 10**10, "cuda": 10**12}
MAX_SCORES = {"cpu": 1 << 22, "cuda": 1 << 29}
COLD_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # more than any cache holds
_OPTIMIZER_MATRICES = {"cpu": (16, 1024), "cuda": (64, 2048)}  # number of square matrices, and their side

_MAX_SECONDS = 60.0  # a further pass starts only if it ends within this time, judged by the first one
_PACKED_SECONDS = 15.0  # for the packed weights that follow the passes, with the toy networks they are measured on
Parts = dict[str, Callable[[], Fields]]  # the functions that measure fields of a calibration, by what they measure


def measure_machine(
    device: str, show_progress: ShowProgress = lambda *progress: None, dtypes: Sequence[str] | None = None
) -> Calibration:
    """Measure "cpu" or "cuda" and return the calibration. It takes about a minute, and longer on a busy machine.

    Parts that an interrupted call has finished are not measured again. A CPU is measured up to three times, as far as a
    minute allows. show_progress: receives the name of each part before it is measured, and the numbers of finished and
    of all parts. dtypes: precisions; by default DTYPES.
    """
    if device not in ("cpu", "cuda"):
        raise unknown_name("device to measure", device, ["cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ClearheadError("this machine has no CUDA device; run: clearhead calibrate --device cpu")
    dtypes = DTYPES[device] if dtypes is None else dtypes
    pass_parts = _list_parts(device, dtypes)
    packed_parts = {f"{weights} weights": partial(measure_packed, weights) for weights in PACKED_FORMATS}
    num_packed = len(packed_parts) if device == "cpu" else 0
    parts = MeasuredParts(device, dtypes, _NUM_PASSES[device] * len(pass_parts) + num_packed, show_progress)
    passes: list[Calibration] = []
    started = time.perf_counter()
    for number in range(1, _NUM_PASSES[device] + 1):
        elapsed = time.perf_counter() - started
        if passes and elapsed + elapsed / len(passes) + _PACKED_SECONDS > _MAX_SECONDS:
            parts.num_parts = len(passes) * len(pass_parts) + num_packed
            break
        passes.append(_measure_pass(device, parts, pass_parts, f"pass {number}"))
    packed: dict[str, dict[str, float]] = {}
    if device == "cpu":
        packed = {
            weights: parts.measure(*part) for weights, part in zip(PACKED_FORMATS, packed_parts.items(), strict=True)
        }
    parts.finish()
    return replace(best_of(passes), packed=packed)


def measure_once(device: str, dtypes: Sequence[str]) -> Calibration:
    """Measure everything but packed weights, in one pass."""
    fields: Fields = {}
    for measure in _list_parts(device, dtypes).values():
        _merge(fields, measure())
    return Calibration(**_identify(device), **fields)


def _measure_pass(device: str, parts: MeasuredParts, measures: Parts, title: str) -> Calibration:
    fields: Fields = _identify(device)
    for name, measure in measures.items():
        _merge(fields, parts.measure(f"{name}, {title}", measure))
    return calibration_from_dict(fields)


def _identify(device: str) -> Fields:
    """Return the fields of a calibration that say what is measured."""
    return {
        "device": device,
        "machine": machine_name(device),
        "torch": torch.__version__,
        "memory_bytes": device_memory_bytes(device),
    }


def _list_parts(device: str, dtypes: Sequence[str]) -> Parts:
    """Return the parts of one pass, in the order in which they are measured."""
    parts: Parts = {
        "bandwidth": lambda: {"traffic": [_measure_traffic(device, num_bytes) for num_bytes in TRAFFIC_BYTES]}
    }
    for dtype in dtypes:
        parts[f"{dtype} matrix products"] = partial(_measure_field, "products", _measure_products, device, dtype)
    for dtype in dtypes:
        parts[f"{dtype} attention"] = partial(_measure_field, "attention", _measure_attention, device, dtype)
        parts[f"{dtype} attention backward"] = partial(
            _measure_field, "attention_backward", _measure_attention_backward, device, dtype
        )
    if device == "cuda":
        parts["kernels of a GPU"] = partial(_measure_gpu, dtypes)
    parts["optimizer"] = lambda: {
        "optimizer": {dtype: _measure_optimizer(device, dtype) for dtype in dtypes},
        "kernel_seconds": _measure_shortest_kernel(device),
    }
    parts["time per operation"] = lambda: {
        "host_seconds": {phase: measure_host_seconds(device, phase) for phase in get_args(Phase)}
    }
    return parts


def _measure_field(name: str, measure: Callable[[str, str], list[Rate]], device: str, dtype: str) -> Fields:
    """Return one precision of a field that has a value for each."""
    return {name: {dtype: measure(device, dtype)}}


def _merge(fields: Fields, part: Fields) -> None:
    """Add the fields of a part; a field that is there already gets the precisions of both."""
    for name, value in part.items():
        fields[name] = fields[name] | value if name in fields else value


@torch.no_grad()
def _measure_gpu(dtypes: Sequence[str]) -> Fields:
    """Return the fields of a calibration that matter on a GPU only."""
    fields: Fields = {
        "uneven": {dtype: measure_uneven("cuda", dtype) for dtype in dtypes},
        "scattered_per_second": next(iter(collect_points([partial(measure_scattered, "cuda")])), None),
        "chosen_per_second": measure_argmax("cuda"),
        "graph_seconds": measure_graph_start(),
        "passes": measure_reductions("cuda") | {"moments": measure_moments(dtypes[0])},
        "row_products": {dtype: measure_row_products(dtype) for dtype in dtypes},
        "row_attention": {dtype: measure_row_attention(dtype) for dtype in dtypes},
    }
    torch.cuda.empty_cache()
    return fields


@torch.no_grad()
def _measure_traffic(device: str, num_bytes: int) -> Traffic:
    """Measure an elementwise kernel that reads as much as it writes; on a CPU, without its fixed time per operation."""
    copies = max(1, min(MAX_COPIES, COLD_BYTES[device] // num_bytes))
    seconds = _elementwise_seconds(device, num_bytes, copies)
    if device == "cpu":
        seconds = max(seconds - _elementwise_seconds(device, 8, 1), seconds / 10)
    return Traffic(num_bytes, num_bytes / seconds)


def _elementwise_seconds(device: str, num_bytes: int, copies: int) -> float:
    sources = torch.ones(copies, num_bytes // 8, device=device)
    targets = torch.empty_like(sources)
    pairs = zip(sources, targets, strict=True)
    return time_runs([partial(torch.mul, source, 2.0, out=target) for source, target in pairs], device)


def _measure_optimizer(device: str, dtype: str) -> float:
    """Return the bytes of parameters that a fused AdamW updates per second."""
    count, side = _OPTIMIZER_MATRICES[device]
    parameters = [torch.zeros(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    seconds = time_step(optimizer.step, device, POINT_SECONDS[device])
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / seconds


@torch.no_grad()
def _measure_products(device: str, dtype: str) -> list[Rate]:
    torch_dtype = getattr(torch, dtype)
    values = torch.randn(1 << 18, device=device, dtype=torch_dtype)
    pool = values.repeat(COLD_BYTES[device] // (values.numel() * torch_dtype.itemsize))
    return collect_points(partial(_measure_product, pool, *shape) for shape in itertools.product(*GRIDS[device]))


def _measure_product(pool: Tensor, rows: int, outputs: int, inputs: int) -> Rate:
    flops = 2 * rows * outputs * inputs
    copies = max(1, min(MAX_COPIES, pool.numel() // (outputs * inputs), _ROUND_FLOPS[pool.device.type] // flops))
    weights = pool[: copies * outputs * inputs].view(copies, outputs, inputs)
    x = torch.randn(rows, inputs, device=pool.device, dtype=pool.dtype)
    runs: list[Run] = [partial(linear, x, weight) for weight in weights]
    return Rate((rows, outputs, inputs), flops / time_runs(runs, pool.device.type, flops=flops))


def _measure_attention_backward(device: str, dtype: str) -> list[Rate]:
    return _measure_attention(device, dtype, backward=True)


def _measure_attention(device: str, dtype: str, backward: bool = False) -> list[Rate]:
    shapes = itertools.product(LENGTHS[device], HEAD_WIDTHS)
    return collect_points(
        partial(_measure_attention_point, device, dtype, backward, *shape)
        for shape in shapes
        if not (backward and shape[0] == 1)
    )


def _measure_attention_point(device: str, dtype: str, backward: bool, length: int, width: int) -> Rate:
    is_decode = length == 1
    num_keys = 2048 if is_decode else length
    num_heads = max(1, min(64 if is_decode else _MAX_HEADS[device], MAX_SCORES[device] // (length * num_keys)))
    flops = round(2 * num_heads * length * num_keys * 2 * width * (2.5 if backward else 1.0))
    query = torch.randn(1, num_heads, length, width, device=device, dtype=getattr(torch, dtype))
    # Decoding: four query heads per key-value head, as in most models, and keys from memory instead of a cache.
    num_kv_heads, copies = (num_heads // 4, 8) if is_decode else (num_heads, 1)
    keys = torch.randn(copies, 2, 1, num_kv_heads, num_keys, width, device=device, dtype=query.dtype)
    runs = [_attention_run(query, key, value, backward) for key, value in keys]
    if backward:  # without a CUDA graph, several runs must be queued for the host to stay ahead
        runs = runs * (1 if device == "cpu" else 8)
    return Rate((length, width), flops / time_runs(runs, device, graph=not backward, flops=flops))


def _attention_run(query: Tensor, key: Tensor, value: Tensor, backward: bool) -> Run:
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
    for tensor in (query, key, value):
        tensor.requires_grad_()
    out = attend()
    return partial(torch.autograd.grad, out, (query, key, value), torch.ones_like(out), retain_graph=True)


def _measure_shortest_kernel(device: str) -> float:
    """Return the seconds of the shortest kernel on a GPU, or 0 on a CPU, where a tiny operation is all host time.

    Different kernels run in turn, as in a network: a kernel that follows itself starts sooner.
    """
    if device == "cpu":
        return 0.0
    tiny = torch.ones(8, 64, device=device)
    kernels: list[Run] = [
        partial(torch.mul, tiny, 2.0),
        partial(torch.add, tiny, tiny),
        partial(torch.rsqrt, tiny),
        partial(torch.mean, tiny, -1),
        partial(tiny.to, torch.bfloat16),
    ]
    return time_runs(kernels * 20, device)


def device_memory_bytes(device: str) -> int:
    """Return the memory of the GPU, or of this machine."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
