"""The measured rates of this machine, saved in a file, and the time of a simulated run from them.

    calibration = load_calibration("cuda"); calibration.run_time(simulate(workload), "bfloat16", "decode")

A kernel takes max(FLOPs / rate of its shape, bytes / bandwidth at its size, the shortest kernel). On a CPU the host's
time for each operation is added. On a GPU a kernel starts when the host has launched it and the previous kernel has
ended.
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

from clearhead.costs.simulation import Kernel, KernelCounter
from clearhead.errors import ClearheadError
from clearhead.files import read_json_object, write_text
from clearhead.home import home

_RATE_TABLES = ("products", "attention", "attention_backward", "row_products", "row_attention", "passes")


@dataclass(frozen=True)
class Rate:
    """The rate at one point of a grid of shapes.

    FLOPs per second at (m, n, k) of a matrix product or at (queries, head width) of attention; bytes per second at
    (row width,) of a reduction.
    """

    shape: tuple[int, ...]
    per_second: float


@dataclass(frozen=True)
class Traffic:
    """The bandwidth of an elementwise kernel of one size."""

    num_bytes: int  # read and written by one kernel
    per_second: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measured rates of one device. Field names are those of the saved file; tables of rates are by precision."""

    device: str
    machine: str
    torch: str
    memory_bytes: int
    traffic: list[Traffic]
    products: dict[str, list[Rate]]
    attention: dict[str, list[Rate]]
    attention_backward: dict[str, list[Rate]]
    optimizer: dict[str, float]  # by precision: bytes of parameters that AdamW updates per second
    kernel_seconds: float  # the shortest kernel
    # By phase: seconds on the host for "each" operation, and what a "launch" and some kinds of kernels add.
    host_seconds: dict[str, dict[str, float]]
    packed: dict[str, dict[str, float]] = field(default_factory=dict)  # CPU, by format of the weights: toy_networks.py
    # CUDA: the Triton kernels of a decode step (gpu_rates.py); row_attention is in bytes per second, not FLOPs.
    row_products: dict[str, list[Rate]] = field(default_factory=dict)
    row_attention: dict[str, list[Rate]] = field(default_factory=dict)
    # CUDA, by precision and axis: maximum FLOPs per second of products with unaligned rows (Kernel.uneven_axes).
    uneven: dict[str, dict[str, float]] = field(default_factory=dict)
    scattered_per_second: float | None = None  # CUDA: elements of operands with different layouts (num_scattered)
    chosen_per_second: float | None = None  # CUDA: elements of a row that argmax reads; rows run in parallel
    graph_seconds: float = 0.0  # CUDA: until the first kernel of a graph starts
    passes: dict[str, list[Rate]] = field(default_factory=dict)  # CUDA: maximum bytes per second of reductions, by name

    @property
    def bytes_per_second(self) -> float:
        """Memory bandwidth: that of the largest size, which fits in no cache."""
        return max(self.traffic, key=lambda point: point.num_bytes).per_second

    def run_time(self, run: KernelCounter, dtype: str, phase: str) -> float:
        """Return the seconds that a simulated run takes on this machine."""
        host, times = self.host_seconds[phase], [self.kernel_time(kernel, dtype) for kernel in run.kernels]
        if run.in_graph:
            return self.graph_seconds + sum(times)
        if self.device == "cpu":
            return sum(times) + run.num_dispatches * host["each"]
        end = launch_seconds = 0.0
        for kernel, seconds in zip(run.kernels, times, strict=True):
            launch_seconds += host.get("launch", 0.0) + host.get(kernel.kind, 0.0)
            end = max(end, kernel.num_dispatches * host["each"] + launch_seconds) + seconds
        return max(end, run.num_dispatches * host["each"] + launch_seconds)

    def kernel_time(self, kernel: Kernel, dtype: str) -> float:
        """Return the seconds that one kernel takes on this machine, without the host's part."""
        decode_time = self._decode_kernel_time(kernel, dtype)
        if decode_time is not None:
            return decode_time
        if kernel.shape is not None:
            rate = interpolate(self.rates("products", dtype), kernel.shape[1:])
            limits = [limit for axis, limit in self.uneven.get(dtype, {}).items() if axis in kernel.uneven_axes]
            return max(kernel.flops / min([rate, *limits]), self.kernel_seconds)
        bandwidth = self.bandwidth(kernel.num_bytes)
        if kernel.name in self.passes:
            bandwidth = min(bandwidth, interpolate(self.passes[kernel.name], (kernel.width,)))
        traffic_time = kernel.num_bytes / bandwidth
        if kernel.attention_shape is None:
            index_time = kernel.num_scattered / self.scattered_per_second if self.scattered_per_second else 0.0
            return max(traffic_time, index_time, self.kernel_seconds)
        num_queries, _, width = kernel.attention_shape
        table = "attention_backward" if kernel.name.endswith("_backward") else "attention"
        compute_time = kernel.flops / interpolate(self.rates(table, dtype), (num_queries, width))
        return max(compute_time, traffic_time, self.kernel_seconds)

    def _decode_kernel_time(self, kernel: Kernel, dtype: str) -> float | None:
        """Return the time of a kernel that only a decode step on a GPU runs, or None for any other kernel."""
        if kernel.name == "multiply_row" and kernel.shape is not None:
            num_matrices, _, outputs, inputs = kernel.shape
            shape = (num_matrices, num_matrices * outputs, inputs)
            return kernel.flops / interpolate(self.rates("row_products", dtype), shape)
        if kernel.name == "attend_row" and kernel.attention_shape is not None:
            return kernel.num_bytes / interpolate(self.rates("row_attention", dtype), kernel.attention_shape)
        if kernel.name == "moments" and kernel.name in self.passes:
            return kernel.num_bytes / interpolate(self.passes[kernel.name], (kernel.width,))
        if kernel.name == "argmax" and self.chosen_per_second is not None:
            return max(kernel.width / self.chosen_per_second, self.kernel_seconds)
        return None

    def bandwidth(self, num_bytes: int) -> float:
        """Return the bytes per second of a kernel that moves this many bytes."""
        return interpolate([Rate((point.num_bytes,), point.per_second) for point in self.traffic], (num_bytes,))

    def rates(self, table: str, dtype: str) -> list[Rate]:
        """Return one table of rates. Raise ClearheadError if this precision was not measured."""
        by_dtype: dict[str, list[Rate]] = getattr(self, table)
        if dtype not in by_dtype:
            raise ClearheadError(f"this machine was not measured in {dtype}; use one of: {', '.join(by_dtype)}")
        return by_dtype[dtype]


def interpolate(table: list[Rate], shape: tuple[int, ...]) -> float:
    """Return the rate at a shape, linear in logarithms between the grid points around it.

    Beyond the grid the rate is that of its edge. The weight of a point that could not be measured goes to the others.
    """
    rates = {point.shape: point.per_second for point in table}
    corners: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for axis, size in enumerate(shape):
        neighbors = _grid_neighbors(sorted({point.shape[axis] for point in table}), size)
        corners = [((*corner, point), weight * part) for corner, weight in corners for point, part in neighbors]
    known = [(rates[corner], weight) for corner, weight in corners if corner in rates]
    if not known:
        raise ClearheadError(f"no rate near shape {shape} was measured on this machine; run clearhead calibrate again")
    return math.exp(sum(weight * math.log(rate) for rate, weight in known) / sum(weight for _, weight in known))


def _grid_neighbors(points: list[int], size: int) -> list[tuple[int, float]]:
    """Return the measured sizes on either side, each with its weight."""
    size = min(max(size, points[0]), points[-1])
    above = bisect_left(points, size)
    if points[above] == size:
        return [(size, 1.0)]
    low, high = points[above - 1], points[above]
    part = math.log(size / low) / math.log(high / low)
    return [(low, 1 - part), (high, part)]


# --- several passes


def best_of(passes: Sequence[Calibration]) -> Calibration:
    """Return the best of each number over several passes: other load on a shared machine only slows it down."""
    return calibration_from_dict(_best_value([asdict(one) for one in passes], "highest"))


def _best_value(values: Sequence[Any], best: Literal["highest", "lowest"]) -> Any:
    match values[0]:
        case dict() as first:
            return {
                name: _best_value([value[name] for value in values], "lowest" if name.endswith("_seconds") else best)
                for name in first
            }
        case list():
            return [_best_value(elements, best) for elements in zip(*values, strict=True)]
        case float():
            return max(values) if best == "highest" else min(values)
        case constant:
            return constant


# --- the file


def calibration_path(device: str) -> Path:
    """Return the file of a device's calibration."""
    return home() / "calibration" / f"{device}.json"


def save_calibration(calibration: Calibration) -> Path:
    """Save a calibration and return its path."""
    path = calibration_path(calibration.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(calibration), indent=1))
    return path


def load_calibration(device: str) -> Calibration | None:
    """Load the calibration of "cpu" or "cuda", or return None if there is none.

    Warn if it was made on another machine or with another torch. Raise ClearheadError if the file is not valid.
    """
    path = calibration_path(device)
    if not path.is_file():
        return None
    try:
        calibration = calibration_from_dict(read_json_object(path))
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ClearheadError(f"{path} is not a calibration of this version; run clearhead calibrate again") from None
    if device == "cpu" or torch.cuda.is_available():
        _warn_if_other_machine(calibration)
    return calibration


def _warn_if_other_machine(calibration: Calibration) -> None:
    """Warn if hardware, threads or torch differ from those that were measured."""
    device = calibration.device
    measured = f"{calibration.machine}, torch {calibration.torch}"
    current = f"{machine_name(device)}, torch {torch.__version__}"
    if measured != current:
        warnings.warn(
            f"the calibration was measured on {measured}, but this is {current}; "
            f"to measure again, run: clearhead calibrate --device {device}",
            stacklevel=1,  # the same line for every caller, so that Python shows the warning once
        )


def machine_name(device: str) -> str:
    """Return the name of the GPU, or of the processor with its number of threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def calibration_from_dict(data: dict[str, Any]) -> Calibration:
    """Return the calibration whose `asdict` is given."""
    for table in _RATE_TABLES:
        data[table] = {
            name: [Rate(tuple(point["shape"]), point["per_second"]) for point in points]
            for name, points in data.get(table, {}).items()
        }
    data["traffic"] = [Traffic(**point) for point in data["traffic"]]
    return Calibration(**data)
