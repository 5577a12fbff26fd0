"""How long something takes: many short runs on the CPU or in a CUDA graph, or a step that lasts.

    seconds_of([lambda: torch.mm(a, b)], "cpu"); clock(step, "cuda")

On CUDA kernels run from a graph, so that the host does not hold them up.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

GRAPH_SECONDS = 1e-3
POINT_SECONDS = {"cpu": 0.02, "cuda": 0.01}  # of one pass
# A GPU at its limit of power lowers its clock after a while: products from this size on are timed that long.
LARGE_FLOPS, SUSTAINED_SECONDS = 10**10, 0.2
ROUND_SECONDS = 0.02  # of steps on a GPU, before the host waits for it

Run = Callable[[], object]
Found = TypeVar("Found")


def seconds_of(runs: list[Run], device: str, graph: bool = True, flops: float = 0.0) -> float:
    """Of one run, on average over all of them in turn; the median of several rounds, on a GPU of the later half.

    flops: of one run.
    """
    if device == "cpu":
        return cpu_seconds(runs)
    seconds = SUSTAINED_SECONDS if flops >= LARGE_FLOPS else POINT_SECONDS[device]
    return graph_seconds(runs, seconds) if graph else event_seconds(runs, seconds)


def measured(points: Iterable[Callable[[], Found]]) -> list[Found]:
    """Those that can be: one that fails is left out and told of, as where memory does not suffice for it."""
    found = []
    for point in points:
        try:
            found.append(point())
        except RuntimeError as error:
            warnings.warn(f"a point of the calibration was skipped: {str(error).splitlines()[0]}", stacklevel=2)
    return found


def cpu_seconds(runs: list[Run]) -> float:
    for run in runs[:2]:
        run()
    rounds: list[float] = []
    started = time.perf_counter()
    while not rounds or time.perf_counter() - started < POINT_SECONDS["cpu"]:
        before = time.perf_counter()
        for run in runs:
            run()
        rounds.append((time.perf_counter() - before) / len(runs))
    return statistics.median(rounds)


def graph_seconds(runs: list[Run], seconds: float) -> float:
    """Short ones again and again, so that the start of the graph does not count."""
    for run in runs[:2]:  # libraries set themselves up outside the graph
        run()
    torch.cuda.synchronize()
    repeats = max(1, min(32, int(GRAPH_SECONDS / event_seconds(runs[:32]))) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs * repeats:
            run()
    return event_seconds([graph.replay], seconds) / (len(runs) * repeats)


def event_seconds(runs: list[Run], seconds: float = 0.0) -> float:
    rounds: list[float] = []
    started = time.perf_counter()
    while len(rounds) < 4 or time.perf_counter() - started < seconds:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for run in runs:
            run()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / len(runs))
    return statistics.median(rounds[len(rounds) // 2 :])


def clock(step: Run, device: str, seconds: float = 2.0, at_least: int = 5) -> float:
    """The median time of a step, after two that warm up. A GPU is not waited for between short ones."""
    several_seconds(step, device, 2)
    per_round = 1 if device == "cpu" else max(1, int(ROUND_SECONDS / several_seconds(step, device, 1)))
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < at_least or time.perf_counter() - started < seconds:
        times.append(several_seconds(step, device, per_round) / per_round)
    return statistics.median(times)


def several_seconds(step: Run, device: str, count: int) -> float:
    before = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before
