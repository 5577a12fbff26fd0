"""Measures this machine: bandwidth by size, rates of products and attention by shape, what an operation costs.

    calibration = measure_machine("cuda")

Weights are taken in turn from more memory than any cache holds, as a network's are. On CUDA kernels run from a graph,
so that the host does not hold them up; what the host costs is measured apart, on a toy network of this package.
"""

import itertools
import os
import platform
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from clearhead.cost.calibration import Calibration, Rate, Traffic
from clearhead.cost.clock import POINT_SECONDS, Run, clock, seconds_of
from clearhead.cost.graph_rates import measure_row_attention, measure_row_products
from clearhead.cost.layout import lay_out
from clearhead.cost.running import build, prepare
from clearhead.cost.workload import Phase, Workload
from clearhead.errors import ClearheadError, unknown
from clearhead.model.branches import FeedForward
from clearhead.model.config import Embedding, GroupedAttention, Head, Layer, ModelConfig, Stack
from clearhead.model.parts import RmsNorm, Rope

DTYPES = ("float32", "bfloat16")
PHASES: tuple[Phase, ...] = ("train", "prefill")
# Sides of the products: rows m, outputs n, inputs k. Each grid ends where larger products are no faster.
GRIDS = {
    "cpu": ((1, 8, 64, 128, 256, 512), (128, 512, 2048), (128, 512, 2048)),
    "cuda": ((1, 8, 64, 512, 4096, 16384), (128, 512, 2048, 8192, 32768), (128, 512, 2048, 8192)),
}
LENGTHS = {"cpu": (1, 32, 128, 512, 2048), "cuda": (1, 128, 512, 2048, 8192)}
HEAD_WIDTHS = (64, 128)
TRAFFIC_BYTES = tuple(1 << power for power in (14, 17, 20, 22, 24, 26, 28))
MOST_COPIES = 1000
ROUND_FLOPS = {
    "cpu": 10**10,
    "cuda": 10**12,
}  # of all copies; then a weight is read so seldom that it may be a warm one
MOST_SCORES = {"cpu": 1 << 22, "cuda": 1 << 29}
COLD_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}

Tell = Callable[[str], object]


def measure_machine(device: str, tell: Tell = lambda what: None, dtypes: Sequence[str] = DTYPES) -> Calibration:
    if device not in ("cpu", "cuda"):
        raise unknown("device to measure", device, ["cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ClearheadError("there is no CUDA device here; run: clearhead calibrate --device cpu")
    with torch.no_grad():
        tell("bandwidth")
        traffic = [measure_traffic(device, size) for size in TRAFFIC_BYTES]
        tell("matrix products")
        products = {dtype: measure_products(device, dtype) for dtype in dtypes}
        tell("attention")
        attention = {dtype: measure_attention(device, dtype, backward=False) for dtype in dtypes}
    backward = {dtype: measure_attention(device, dtype, backward=True) for dtype in dtypes}
    rows = {}
    if device == "cuda":
        tell("kernels of a decoded token")
        with torch.no_grad():
            rows["row_products"] = {dtype: measure_row_products(dtype) for dtype in dtypes}
            rows["row_attention"] = {dtype: measure_row_attention(dtype) for dtype in dtypes}
        torch.cuda.empty_cache()
    tell("what an operation costs")
    return Calibration(
        device=device,
        machine=machine_name(device),
        torch=torch.__version__,
        memory_bytes=memory_of(device),
        traffic=traffic,
        products=products,
        attention=attention,
        attention_backward=backward,
        optimizer={dtype: measure_optimizer(device, dtype) for dtype in dtypes},
        kernel_seconds=shortest_kernel(device),
        host_seconds={"train" if phase == "train" else "run": host_seconds(device, phase) for phase in PHASES},
        **rows,
    )


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
    parameters = [torch.zeros(1024, 1024, device=device, dtype=getattr(torch, dtype)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    seconds = clock(optimizer.step, device, POINT_SECONDS[device])
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters) / seconds


def measure_products(device: str, dtype: str) -> list[Rate]:
    kind = getattr(torch, dtype)
    pool = torch.randn(COLD_BYTES[device] // kind.itemsize, device=device, dtype=kind)
    return [measure_product(pool, rows, outputs, inputs) for rows, outputs, inputs in itertools.product(*GRIDS[device])]


def measure_product(pool: Tensor, rows: int, outputs: int, inputs: int) -> Rate:
    flops = 2 * rows * outputs * inputs
    copies = max(1, min(MOST_COPIES, pool.numel() // (outputs * inputs), ROUND_FLOPS[pool.device.type] // flops))
    weights = pool[: copies * outputs * inputs].view(copies, outputs, inputs)
    x = torch.randn(rows, inputs, device=pool.device, dtype=pool.dtype)
    runs: list[Run] = [partial(linear, x, weight) for weight in weights]
    return Rate((rows, outputs, inputs), flops / seconds_of(runs, pool.device.type))


def measure_attention(device: str, dtype: str, backward: bool) -> list[Rate]:
    found = []
    for length, width in itertools.product(LENGTHS[device], HEAD_WIDTHS):
        if backward and length == 1:
            continue
        num_keys = 2048 if length == 1 else length
        heads = max(1, min(64, MOST_SCORES[device] // (length * num_keys)))
        flops = round(2 * heads * length * num_keys * 2 * width * (2.5 if backward else 1.0))
        query = torch.randn(1, heads, length, width, device=device, dtype=getattr(torch, dtype))
        # Four query heads to one of keys, as most models have it, and keys from memory, as they come when decoding.
        kv_heads, copies = (heads // 4, 8) if length == 1 else (heads, 1)
        keys = torch.randn(copies, 2, 1, kv_heads, num_keys, width, device=device, dtype=query.dtype)
        runs = [attention_run(query, key, value, backward) for key, value in keys]
        seconds = seconds_of(runs, device, graph=not backward)
        found.append(Rate((length, width), flops / seconds))
    return found


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
    """On the CPU the host's work is all there is to a tiny operation."""
    if device == "cpu":
        return 0.0
    tiny = torch.ones(64, device=device)
    return seconds_of([lambda: tiny.mul_(1.0)] * 100, device)


def host_seconds(device: str, phase: Phase) -> float:
    """For each operation of a toy network, views included: there all time is the host's."""
    workload = Workload(
        config=toy(),
        phase=phase,
        context=8,
        source=8,
        dtype="float32",
        device_type="cpu" if device == "cpu" else "cuda",
    )
    step = prepare(build(workload, device), workload)
    return clock(step, device, seconds=1.5) / lay_out(workload).num_dispatches


def toy() -> ModelConfig:
    attention = GroupedAttention(num_heads=2, num_kv_heads=1, head_width=32, position=Rope())
    inner = FeedForward(width=64, activation="silu", gated=True)
    norm = RmsNorm(epsilon=1e-5)
    layer = Layer(attention=attention, feed_forward=inner, norm=norm)
    stack = Stack(embedding=Embedding(vocab_size=64), layers=(layer,) * 12, final_norm=norm)
    return ModelConfig(width=64, context=64, decoder=stack, head=Head())


def machine_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def memory_of(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
