"""What devices can do at most: the published peaks, with their sources, and this machine as measured.

    device("h200").flops_per_second["bfloat16"]

Peaks are of dense products; the figures "with sparsity" in the same sheets are twice as high and of no use here.
"""

from dataclasses import dataclass

from clearhead.costs.calibration.calibration import Calibration, load_calibration
from clearhead.errors import ClearheadError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: dict[str, float]  # by precision
    link_bytes_per_second: float | None  # to other GPUs, each way
    source: str
    calibration: Calibration | None = None  # None: nominal

    def peak(self, dtype: str) -> float:
        if dtype not in self.flops_per_second:
            raise ClearheadError(
                f"no rate of {dtype} is known for {self.name}; known are: {', '.join(self.flops_per_second)}"
            )
        return self.flops_per_second[dtype]


def rates(half: float, single: float, double: float) -> dict[str, float]:
    return {"bfloat16": half, "float16": half, "float32": single, "float64": double}


DEVICES = (
    Device(
        name="h200",
        memory_bytes=141e9,
        bytes_per_second=4.8e12,
        flops_per_second=rates(989e12, 67e12, 34e12),
        link_bytes_per_second=450e9,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM",
    ),
    Device(
        name="h100",
        memory_bytes=80e9,
        bytes_per_second=3.35e12,
        flops_per_second=rates(989e12, 67e12, 34e12),
        link_bytes_per_second=450e9,
        source="NVIDIA H100 Tensor Core GPU datasheet, SXM",
    ),
    Device(
        name="a100",
        memory_bytes=80e9,
        bytes_per_second=2.039e12,
        flops_per_second=rates(312e12, 19.5e12, 9.7e12),
        link_bytes_per_second=300e9,
        source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM",
    ),
    Device(
        name="rtx-4090",
        memory_bytes=24e9,
        bytes_per_second=1.008e12,
        flops_per_second=rates(165.2e12, 82.6e12, 1.29e12),
        link_bytes_per_second=32e9,
        source="NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090, sums in float32; PCIe 4.0 x16",
    ),
    Device(
        name="l40s",
        memory_bytes=48e9,
        bytes_per_second=864e9,
        flops_per_second=rates(362e12, 91.6e12, 1.43e12),
        link_bytes_per_second=32e9,
        source="NVIDIA L40S GPU datasheet; float64 at 1/64 of float32, as its architecture has it; PCIe 4.0 x16",
    ),
)


def device_named(gpu: str) -> Device | None:
    """By what the driver calls it, such as "NVIDIA GeForce RTX 4090"."""
    return next((one for one in DEVICES if one.name in gpu.lower().replace(" ", "-")), None)


def device(name: str) -> Device:
    """By its name, or `cpu` and `cuda`: this machine, as `clearhead calibrate` has measured it."""
    named = {one.name: one for one in DEVICES}
    if name in named:
        return named[name]
    if name not in ("cpu", "cuda"):
        raise unknown_name("device", name, [*named, "cpu", "cuda"])
    found = load_calibration(name)
    if found is None:
        raise ClearheadError(f"this machine's {name} is not measured yet; run: clearhead calibrate --device {name}")
    return Device(
        name=name,
        memory_bytes=found.memory_bytes,
        bytes_per_second=found.bytes_per_second,
        flops_per_second={dtype: max(rate.per_second for rate in table) for dtype, table in found.products.items()},
        link_bytes_per_second=None,
        source=f"measured here: {found.machine}",
        calibration=found,
    )
