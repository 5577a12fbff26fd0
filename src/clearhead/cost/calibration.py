"""This machine as measured, kept in a file, and how long a list of kernels takes on it.

calibration = load_calibration("cuda"); calibration.seconds(kernels, num_dispatches, "bfloat16", "decode")

a kernel's time = max(FLOPs / rate of its shape, bytes / bandwidth at that size, the shortest there is)
CPU: the host's work for each operation comes before its kernel, so both add up
GPU: the host runs ahead; the slower of the two, all host work or all kernels, is what one waits for
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from clearhead.cost.counter import Kernel
from clearhead.errors import ClearheadError
from clearhead.home import home

TABLES = ("products", "attention", "attention_backward")


@dataclass(frozen=True)
class Rate:
    """FLOPs per second at one shape: (m, n, k) of a product, (queries, head width) of attention."""

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
    kernel_seconds: float  # the shortest that a kernel takes
    host_seconds: dict[str, float]  # for each operation, "train" or "run"

    @property
    def bytes_per_second(self) -> float:
        """To and from memory: at the largest size, which fits no cache."""
        return max(self.traffic, key=lambda point: point.num_bytes).per_second

    def seconds(self, kernels: Iterable[Kernel], num_dispatches: int, dtype: str, phase: str) -> float:
        on_device = sum(self.kernel_time(kernel, dtype) for kernel in kernels)
        on_host = num_dispatches * self.host_seconds["train" if phase == "train" else "run"]
        return on_device + on_host if self.device == "cpu" else max(on_device, on_host)

    def kernel_time(self, kernel: Kernel, dtype: str) -> float:
        if kernel.shape is not None:
            rate = between(self.rates("products", dtype), kernel.shape[1:])
            return max(kernel.flops / rate, self.kernel_seconds)
        moving = kernel.num_bytes / self.bandwidth(kernel.num_bytes)
        if kernel.attention is None:
            return max(moving, self.kernel_seconds)
        queries, _, width = kernel.attention
        table = "attention_backward" if kernel.name.endswith("_backward") else "attention"
        return max(kernel.flops / between(self.rates(table, dtype), (queries, width)), moving, self.kernel_seconds)

    def bandwidth(self, num_bytes: int) -> float:
        """Between the two measured sizes on either side, by the logarithm."""
        points = sorted(self.traffic, key=lambda point: point.num_bytes)
        size = min(max(num_bytes, points[0].num_bytes), points[-1].num_bytes)
        for low, high in pairwise(points):
            if size <= high.num_bytes:
                part = math.log(size / low.num_bytes) / math.log(high.num_bytes / low.num_bytes)
                return low.per_second ** (1 - part) * high.per_second**part
        return points[-1].per_second

    def rates(self, table: str, dtype: str) -> list[Rate]:
        found: dict[str, list[Rate]] = getattr(self, table)
        if dtype not in found:
            raise ClearheadError(f"this machine was not measured in {dtype}; measured were: {', '.join(found)}")
        return found[dtype]


def between(table: list[Rate], shape: tuple[int, ...]) -> float:
    """The mean of the measured logarithms, each weighed by 1 / distance⁴, with sizes as powers of two."""
    weights, total = 0.0, 0.0
    for point in table:
        apart = sum(math.log2(one / other) ** 2 for one, other in zip(point.shape, shape, strict=True))
        weight = (apart + 1e-3) ** -2
        weights, total = weights + weight, total + weight * math.log(point.per_second)
    return math.exp(total / weights)


def calibration_path(device: str) -> Path:
    return home() / "calibration" / f"{device}.json"


def save_calibration(calibration: Calibration) -> Path:
    path = calibration_path(calibration.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(calibration), indent=1), encoding="utf-8")
    return path


def load_calibration(device: str) -> Calibration | None:
    path = calibration_path(device)
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for table in TABLES:
            data[table] = {
                dtype: [Rate(tuple(row["shape"]), row["per_second"]) for row in rows]
                for dtype, rows in data[table].items()
            }
        data["traffic"] = [Traffic(**row) for row in data["traffic"]]
        return Calibration(**data)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ClearheadError(f"{path} is not a calibration of this version; run clearhead calibrate again") from None
