"""Measures this machine: bandwidth by size, rates of products and attention by shape, what an operation costs.

    calibration = measure_machine("cuda")

Weights are taken in turn from more memory than any cache holds, as a network's are. On CUDA kernels run from a graph,
so that the host does not hold them up; what the host costs is measured apart, on a toy network of this package.
"""

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from clearhead.cost.calibration import Calibration, Rate, Traffic
from clearhead.cost.layout import lay_out
from clearhead.cost.running import build, prepare
from clearhead.cost.workload import Workload
from clearhead.errors import ClearheadError, unknown
from clearhead.model.branches import FeedForward
from clearhead.model.config import Embedding, GroupedAttention, Head, Layer, ModelConfig, Stack
from clearhead.model.parts import RmsNorm, Rope

DTYPES = ("float32", "bfloat16")
PHASES = ("train", "decode")
# Sides of the products: rows m, inputs k, outputs n. A product of one row depends on its inputs most.
ROWS = (1, 8, 64, 512, 4096, 16384)
INPUTS = (128, 512, 1024, 4096, 16384)
OUTPUTS = (128, 512, 2048, 8192, 65536)
LENGTHS = (1, 128, 512, 2048, 8192)
HEAD_WIDTHS = (64, 128)
TRAFFIC_BYTES = tuple(1 << power for power in (14, 17, 20, 22, 24, 26, 28))
MOST_FLOPS = {"cpu": 3e9, "cuda": 1e12}  # of one product: a tenth of a second at 30 GFLOP/s; 15 ms at 67 TFLOP/s
MOST_COPIES = 1000
COLD_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
GRAPH_SECONDS = 1e-3
POINT_SECONDS = {"cpu": 0.06, "cuda": 0.01}

Run = Callable[[], object]
Tell = Callable[[str], object]


def measure_machine(device: str, tell: Tell = lambda what: None) -> Calibration:
    if device not in ("cpu", "cuda"):
        raise unknown("device to measure", device, ["cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise ClearheadError("there is no CUDA device here; run: clearhead calibrate --device cpu")
    with torch.no_grad():
        tell("bandwidth")
        traffic = [measure_traffic(device, size) for size in TRAFFIC_BYTES]
        tell("matrix products")
        products = {dtype: measure_products(device, dtype) for dtype in DTYPES}
        tell("attention")
        attention = {dtype: measure_attention(device, dtype, backward=False) for dtype in DTYPES}
    backward = {dtype: measure_attention(device, dtype, backward=True) for dtype in DTYPES}
    if device == "cuda":
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
        kernel_seconds=shortest_kernel(device),
        host_seconds={"train" if phase == "train" else "run": host_seconds(device, phase) for phase in PHASES},
    )


def measure_traffic(device: str, num_bytes: int) -> Traffic:
    """One number read for each one written."""
    source = torch.ones(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return Traffic(num_bytes, num_bytes / seconds_of([lambda: torch.mul(source, 2.0, out=target)], device))


def measure_products(device: str, dtype: str) -> list[Rate]:
    kind = getattr(torch, dtype)
    pool = torch.randn(COLD_BYTES[device] // kind.itemsize, device=device, dtype=kind)
    return [
        measure_product(pool, rows, outputs, inputs)
        for rows, outputs, inputs in itertools.product(ROWS, OUTPUTS, INPUTS)
        if outputs * inputs <= pool.numel() and 2 * rows * outputs * inputs <= MOST_FLOPS[device]
    ]


def measure_product(pool: Tensor, rows: int, outputs: int, inputs: int) -> Rate:
    """Of many rows one weight is enough: it is read so seldom that it does not matter from where."""
    copies = min(MOST_COPIES, pool.numel() // (outputs * inputs)) if rows <= 64 else 1
    weights = pool[: copies * outputs * inputs].view(copies, outputs, inputs)
    x = torch.randn(rows, inputs, device=pool.device, dtype=pool.dtype)
    runs: list[Run] = [partial(linear, x, weight) for weight in weights]
    seconds = seconds_of(runs, pool.device.type)
    return Rate((rows, outputs, inputs), 2 * rows * outputs * inputs / seconds)


def measure_attention(device: str, dtype: str, backward: bool) -> list[Rate]:
    found = []
    for length, width in itertools.product(LENGTHS, HEAD_WIDTHS):
        num_keys = 2048 if length == 1 else length
        head_flops = round(2 * length * num_keys * 2 * width * (2.5 if backward else 1.0))
        heads = min(64, 65536 // length, int(MOST_FLOPS[device] / head_flops))
        if heads == 0 or (backward and length == 1):
            continue
        query = torch.randn(1, heads, length, width, device=device, dtype=getattr(torch, dtype))
        key, value = (torch.randn(1, heads, num_keys, width, device=device, dtype=query.dtype) for _ in range(2))
        seconds = seconds_of([attention_run(query, key, value, backward)], device, graph=not backward)
        found.append(Rate((length, width), heads * head_flops / seconds))
    return found


def attention_run(query: Tensor, key: Tensor, value: Tensor, backward: bool) -> Run:
    causal = query.shape[2] > 1
    if not backward:
        return lambda: scaled_dot_product_attention(query, key, value, is_causal=causal)
    for part in (query, key, value):
        part.requires_grad_()
    out = scaled_dot_product_attention(query, key, value, is_causal=causal)
    return partial(torch.autograd.grad, out, (query, key, value), torch.ones_like(out), retain_graph=True)


def shortest_kernel(device: str) -> float:
    """On the CPU the host's work is all there is to a tiny operation."""
    if device == "cpu":
        return 0.0
    tiny = torch.ones(64, device=device)
    return seconds_of([lambda: tiny.mul_(1.0)] * 100, device)


def host_seconds(device: str, phase: str) -> float:
    """For each operation of a toy network, views included: there all time is the host's."""
    workload = Workload(
        config=toy(),
        phase="train" if phase == "train" else "decode",
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


# --- the clock


def seconds_of(runs: list[Run], device: str, graph: bool = True) -> float:
    """Of one run, on average over all of them in turn; the median of several rounds."""
    if device == "cpu":
        return cpu_seconds(runs)
    return graph_seconds(runs) if graph else event_seconds(runs)


def cpu_seconds(runs: list[Run]) -> float:
    rounds: list[float] = []
    started = time.perf_counter()
    for run in runs:
        run()
    while len(rounds) < 2 or time.perf_counter() - started < POINT_SECONDS["cpu"]:
        before = time.perf_counter()
        for run in runs:
            run()
        rounds.append((time.perf_counter() - before) / len(runs))
    return statistics.median(rounds)


def graph_seconds(runs: list[Run]) -> float:
    """Short ones again and again, so that the start of the graph does not count."""
    for run in runs[:2]:  # libraries set themselves up outside the graph
        run()
    torch.cuda.synchronize()
    repeats = max(1, min(32, int(GRAPH_SECONDS / event_seconds(runs))) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs * repeats:
            run()
    return event_seconds([graph.replay]) / (len(runs) * repeats)


def event_seconds(runs: list[Run]) -> float:
    rounds: list[float] = []
    started = time.perf_counter()
    while len(rounds) < 5 or time.perf_counter() - started < POINT_SECONDS["cuda"]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for run in runs:
            run()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / len(runs))
    return statistics.median(rounds[1:])


def clock(step: Run, device: str, seconds: float = 2.0, at_least: int = 5) -> float:
    """The median time of a step, after two that warm up."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < at_least + 2 or time.perf_counter() - started < seconds:
        before = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    return statistics.median(times[2:])


# --- the machine


def machine_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def memory_of(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
