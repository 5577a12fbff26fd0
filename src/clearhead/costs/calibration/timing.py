"""Measure seconds: of short kernels, repeated many times, or of one longer step.

    time_runs([lambda: torch.mm(a, b)], "cpu"); time_step(step, "cuda")

On CUDA, kernels run from a graph, so that the host does not delay them.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

_GRAPH_SECONDS = 1e-3
POINT_SECONDS = {"cpu": 0.02, "cuda": 0.01}  # of one pass
# A round on a CPU ends early after this time. Other processes can make a kernel take 100 times as long, because it
# waits for the slowest of its threads; without this limit, a calibration of one minute then takes half an hour.
MAX_ROUND_SECONDS = 0.25
# A GPU at its power limit lowers its clock after a while, so products from this size on are timed for longer.
_LARGE_FLOPS, _SUSTAINED_SECONDS = 10**10, 0.2
_ROUND_SECONDS = 0.02  # steps on a GPU between two synchronizations

Run = Callable[[], object]
Result = TypeVar("Result")


def time_runs(runs: list[Run], device: str, graph: bool = True, flops: float = 0.0) -> float:
    """Return the seconds of one run: the mean over all runs in turn, the median over rounds.

    On a GPU only the later half of the rounds counts. graph: run in a CUDA graph. flops: FLOPs of one run.
    """
    if device == "cpu":
        return _cpu_seconds(runs)
    seconds = _SUSTAINED_SECONDS if flops >= _LARGE_FLOPS else POINT_SECONDS[device]
    return graph_seconds(runs, seconds) if graph else _event_seconds(runs, seconds)


def collect_points(points: Iterable[Callable[[], Result]]) -> list[Result]:
    """Return the results of all points that can be measured; warn about one that fails, for example out of memory."""
    results = []
    for point in points:
        try:
            results.append(point())
        except RuntimeError as error:
            warnings.warn(f"a point of the calibration was skipped: {str(error).splitlines()[0]}", stacklevel=2)
    return results


def _cpu_seconds(runs: list[Run]) -> float:
    for run in runs[:2]:
        run()
    rounds: list[float] = []
    started = time.perf_counter()
    while not rounds or time.perf_counter() - started < POINT_SECONDS["cpu"]:
        rounds.append(_round_seconds(runs))
    return statistics.median(rounds)


def _round_seconds(runs: list[Run]) -> float:
    """Return the mean seconds of the runs, or of those that end within the limit."""
    started = time.perf_counter()
    ends: list[float] = []
    for run in runs:
        run()
        ends.append(time.perf_counter())
        if ends[-1] - started > MAX_ROUND_SECONDS:
            break
    return (ends[-1] - started) / len(ends)


def graph_seconds(runs: list[Run], seconds: float) -> float:
    """Time runs in a CUDA graph, short ones repeatedly, so that the start of the graph does not count."""
    for run in runs[:2]:  # libraries must initialize outside the graph
        run()
    torch.cuda.synchronize()
    repeats = max(1, min(32, int(_GRAPH_SECONDS / _event_seconds(runs[:32]))) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs * repeats:
            run()
    return _event_seconds([graph.replay], seconds) / (len(runs) * repeats)


def _event_seconds(runs: list[Run], seconds: float = 0.0) -> float:
    """Time runs on a GPU with CUDA events."""
    rounds: list[float] = []
    started = time.perf_counter()
    while len(rounds) < 4 or time.perf_counter() - started < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for run in runs:
            run()
        end.record()
        end.synchronize()
        rounds.append(start.elapsed_time(end) / 1e3 / len(runs))
    return statistics.median(rounds[len(rounds) // 2 :])


def time_step(step: Run, device: str, seconds: float = 2.0, min_rounds: int = 5) -> float:
    """Return the median seconds of a step, after two warm-up steps.

    Short steps on a GPU are not synchronized one by one.
    """
    time_repeats(step, device, 2)
    per_round = 1 if device == "cpu" else max(1, int(_ROUND_SECONDS / time_repeats(step, device, 1)))
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < min_rounds or time.perf_counter() - started < seconds:
        times.append(time_repeats(step, device, per_round) / per_round)
    return statistics.median(times)


def time_repeats(step: Run, device: str, count: int) -> float:
    """Return the seconds that `count` runs of a step take together."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
