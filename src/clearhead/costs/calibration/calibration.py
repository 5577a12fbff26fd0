"""This machine as measured, kept in a file, and how long a list of kernels takes on it.

calibration = load_calibration("cuda"); calibration.seconds(lay_out(workload), "bfloat16", "decode")

a kernel's time = max(FLOPs / rate of its shape, bytes / bandwidth at that size, the shortest there is)
CPU: the host's work for each operation comes before its kernel, so both add up
GPU: a kernel begins when the host has come to it and the kernel before has ended
"""

import json
import math
import platform
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from clearhead.costs.simulation.counter import Counter, Kernel
from clearhead.errors import ClearheadError
from clearhead.files import read_object, write_text
from clearhead.home import home

TABLES = ("products", "attention", "attention_backward", "row_products", "row_attention", "passes")


@dataclass(frozen=True)
class Rate:
    """FLOPs per second at one point of a grid: (m, n, k) of a product, (queries, head width) of attention; of passes
    bytes per second at (width of a row,)."""

    shape: tuple[int, ...]
    per_second: float


@dataclass(frozen=True)
class Traffic:
    num_bytes: int  # read and written by one kernel
    per_second: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    device: str
    machine: str
    torch: str
    memory_bytes: int
    traffic: list[Traffic]
    products: dict[str, list[Rate]]  # by precision
    attention: dict[str, list[Rate]]
    attention_backward: dict[str, list[Rate]]
    optimizer: dict[str, float]  # by precision: bytes of parameters that AdamW changes in a second
    kernel_seconds: float  # the shortest that a kernel takes
    host_seconds: dict[
        str, dict[str, float]
    ]  # by phase: for "each" operation; what a "launch" and kinds of kernels add
    packed: dict[str, dict[str, float]] = field(default_factory=dict)  # CPU, by format of the weights: packed_rates.py
    # CUDA: the kernels of a decoded token (graph_rates.py); of attention bytes per second, not FLOPs
    row_products: dict[str, list[Rate]] = field(default_factory=dict)
    row_attention: dict[str, list[Rate]] = field(default_factory=dict)
    # CUDA: the most FLOPs per second where rows of a matrix are not aligned, by precision and side (see Kernel.uneven)
    uneven: dict[str, dict[str, float]] = field(default_factory=dict)
    scattered_per_second: float | None = None  # CUDA: numbers whose addresses are worked out one by one
    chosen_per_second: float | None = None  # CUDA: numbers of a row whose largest is sought; rows go side by side
    graph_seconds: float = 0.0  # CUDA: until a graph's first kernel begins
    passes: dict[str, list[Rate]] = field(default_factory=dict)  # CUDA: the most bytes per second, by name of a kernel

    @property
    def bytes_per_second(self) -> float:
        """To and from memory: at the largest size, which fits no cache."""
        return max(self.traffic, key=lambda point: point.num_bytes).per_second

    def seconds(self, run: Counter, dtype: str, phase: str) -> float:
        host, times = self.host_seconds[phase], [self.kernel_time(kernel, dtype) for kernel in run.kernels]
        if run.in_graph:
            return self.graph_seconds + sum(times)
        if self.device == "cpu":
            return sum(times) + run.num_dispatches * host["each"]
        ended = longer = 0.0
        for kernel, seconds in zip(run.kernels, times, strict=True):
            longer += host.get("launch", 0.0) + host.get(kernel.kind, 0.0)
            ended = max(ended, kernel.num_dispatches * host["each"] + longer) + seconds
        return max(ended, run.num_dispatches * host["each"] + longer)

    def kernel_time(self, kernel: Kernel, dtype: str) -> float:
        if kernel.name == "multiply_row" and kernel.shape is not None:
            count, _, outputs, inputs = kernel.shape
            return kernel.flops / between(self.rates("row_products", dtype), (count, count * outputs, inputs))
        if kernel.name == "attend_row" and kernel.attention is not None:
            return kernel.num_bytes / between(self.rates("row_attention", dtype), kernel.attention)
        if kernel.name == "moments" and kernel.name in self.passes:
            return kernel.num_bytes / between(self.passes[kernel.name], (kernel.width,))
        if kernel.name == "argmax" and self.chosen_per_second is not None:
            return max(kernel.width / self.chosen_per_second, self.kernel_seconds)
        if kernel.shape is not None:
            rate = between(self.rates("products", dtype), kernel.shape[1:])
            limits = [most for side, most in self.uneven.get(dtype, {}).items() if side in kernel.uneven]
            return max(kernel.flops / min([rate, *limits]), self.kernel_seconds)
        bandwidth = self.bandwidth(kernel.num_bytes)
        if kernel.name in self.passes:
            bandwidth = min(bandwidth, between(self.passes[kernel.name], (kernel.width,)))
        moving = kernel.num_bytes / bandwidth
        if kernel.attention is None:
            finding = kernel.num_scattered / self.scattered_per_second if self.scattered_per_second else 0.0
            return max(moving, finding, self.kernel_seconds)
        queries, _, width = kernel.attention
        table = "attention_backward" if kernel.name.endswith("_backward") else "attention"
        return max(kernel.flops / between(self.rates(table, dtype), (queries, width)), moving, self.kernel_seconds)

    def bandwidth(self, num_bytes: int) -> float:
        return between([Rate((point.num_bytes,), point.per_second) for point in self.traffic], (num_bytes,))

    def rates(self, table: str, dtype: str) -> list[Rate]:
        found: dict[str, list[Rate]] = getattr(self, table)
        if dtype not in found:
            raise ClearheadError(f"this machine was not measured in {dtype}; measured were: {', '.join(found)}")
        return found[dtype]


def between(table: list[Rate], shape: tuple[int, ...]) -> float:
    """From the corners of the measured grid around it, linear in logarithms; beyond the grid the rate at its edge.

    A corner that could not be measured leaves its share to the others.
    """
    rates = {point.shape: point.per_second for point in table}
    corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for axis, size in enumerate(shape):
        around = neighbours(sorted({point.shape[axis] for point in table}), size)
        corners = [((*place, point), share * part) for place, share in corners for point, part in around]
    known = [(rates[place], share) for place, share in corners if place in rates]
    if not known:
        raise ClearheadError(f"nothing near a shape of {shape} was measured here; run clearhead calibrate again")
    return math.exp(sum(share * math.log(rate) for rate, share in known) / sum(share for _, share in known))


def neighbours(points: list[int], size: int) -> list[tuple[int, float]]:
    """The measured sizes on either side, with the share of each."""
    size = min(max(size, points[0]), points[-1])
    above = bisect_left(points, size)
    if points[above] == size:
        return [(size, 1.0)]
    low, high = points[above - 1], points[above]
    part = math.log(size / low) / math.log(high / low)
    return [(low, 1 - part), (high, part)]


def fastest(passes: Sequence[Calibration]) -> Calibration:
    """Number by number the best of them: whoever shares a machine only slows it down, for seconds at a time."""
    return from_data(best([asdict(one) for one in passes], "more"))


def best(found: Sequence[Any], better: Literal["more", "less"]) -> Any:
    match found[0]:
        case dict() as first:
            return {
                name: best([one[name] for one in found], "less" if name.endswith("_seconds") else better)
                for name in first
            }
        case list():
            return [best(alike, better) for alike in zip(*found, strict=True)]
        case float():
            return max(found) if better == "more" else min(found)
        case same:
            return same


def calibration_path(device: str) -> Path:
    return home() / "calibration" / f"{device}.json"


def save_calibration(calibration: Calibration) -> Path:
    path = calibration_path(calibration.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(calibration), indent=1))
    return path


def load_calibration(device: str) -> Calibration | None:
    path = calibration_path(device)
    if not path.is_file():
        return None
    try:
        found = from_data(read_object(path))
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ClearheadError(f"{path} is not a calibration of this version; run clearhead calibrate again") from None
    if device == "cpu" or torch.cuda.is_available():
        check_machine(found)
    return found


def check_machine(found: Calibration) -> None:
    """Its times are those of other hardware, threads or kernels, where these are not what was measured."""
    made, here = f"{found.machine}, torch {found.torch}", f"{machine_name(found.device)}, torch {torch.__version__}"
    if made != here:
        warnings.warn(
            f"measured was {made}, and this is {here}; to measure it: clearhead calibrate --device {found.device}",
            stacklevel=1,  # told once, whoever asks
        )


def machine_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def from_data(data: dict[str, Any]) -> Calibration:
    """The other way of `asdict`."""
    for table in TABLES:
        data[table] = {
            dtype: [Rate(tuple(row["shape"]), row["per_second"]) for row in rows] for dtype, rows in data[table].items()
        }
    data["traffic"] = [Traffic(**row) for row in data["traffic"]]
    return Calibration(**data)
