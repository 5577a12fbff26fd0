"""Peak rates of devices: published ones with their sources, and this machine as measured.

    find_device("h200").peak("bfloat16")

Published peaks are those of dense products. The figures "with sparsity" in the same datasheets are twice as high and do
not apply here.
"""

from dataclasses import dataclass

from clearhead.costs.calibration.rates import Calibration, load_calibration
from clearhead.errors import ClearheadError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Device:
    """Memory, bandwidth and peak FLOPs of a device."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops_per_second: dict[str, float]  # by precision
    link_bytes_per_second: float | None  # to other GPUs, each way
    source: str
    calibration: Calibration | None = None  # None: published numbers

    def peak(self, dtype: str) -> float:
        """Return the peak FLOPs per second in a precision. Raise ClearheadError if it is not known."""
        if dtype not in self.flops_per_second:
            raise ClearheadError(
                f"the peak rate of {self.name} in {dtype} is not known; use one of: {', '.join(self.flops_per_second)}"
            )
        return self.flops_per_second[dtype]


def _flops_by_dtype(half: float, single: float, double: float) -> dict[str, float]:
    return {"bfloat16": half, "float16": half, "float32": single, "float64": double}


DEVICES = (
    Device(
        name="h200",
        memory_bytes=141e9,
        bytes_per_second=4.8e12,
        flops_per_second=_flops_by_dtype(989e12, 67e12, 34e12),
        link_bytes_per_second=450e9,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM",
    ),
    Device(
        name="h100",
        memory_bytes=80e9,
        bytes_per_second=3.35e12,
        flops_per_second=_flops_by_dtype(989e12, 67e12, 34e12),
        link_bytes_per_second=450e9,
        source="NVIDIA H100 Tensor Core GPU datasheet, SXM",
    ),
    Device(
        name="a100",
        memory_bytes=80e9,
        bytes_per_second=2.039e12,
        flops_per_second=_flops_by_dtype(312e12, 19.5e12, 9.7e12),
        link_bytes_per_second=300e9,
        source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM",
    ),
    Device(
        name="rtx-4090",
        memory_bytes=24e9,
        bytes_per_second=1.008e12,
        flops_per_second=_flops_by_dtype(165.2e12, 82.6e12, 1.29e12),
        link_bytes_per_second=32e9,
        source="NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090, float32 accumulation; PCIe 4.0 x16",
    ),
    Device(
        name="l40s",
        memory_bytes=48e9,
        bytes_per_second=864e9,
        flops_per_second=_flops_by_dtype(362e12, 91.6e12, 1.43e12),
        link_bytes_per_second=32e9,
        source="NVIDIA L40S GPU datasheet; float64 at 1/64 of float32, as in its architecture; PCIe 4.0 x16",
    ),
)


def device_for_gpu(gpu_name: str) -> Device | None:
    """Return the device by the name that its driver reports, such as "NVIDIA GeForce RTX 4090", or None."""
    return next((device for device in DEVICES if device.name in gpu_name.lower().replace(" ", "-")), None)


def find_device(name: str) -> Device:
    """Return a device by name; "cpu" and "cuda" are this machine, as `clearhead calibrate` has measured it.

    Raise ClearheadError if the name is unknown or this machine is not calibrated.
    """
    published = {device.name: device for device in DEVICES}
    if name in published:
        return published[name]
    if name not in ("cpu", "cuda"):
        raise unknown_name("device", name, [*published, "cpu", "cuda"])
    calibration = load_calibration(name)
    if calibration is None:
        part = {"cpu": "CPU", "cuda": "GPU"}[name]
        raise ClearheadError(f"this machine's {part} has not been measured; run: clearhead calibrate --device {name}")
    peaks = {dtype: max(rate.per_second for rate in rates) for dtype, rates in calibration.products.items()}
    return Device(
        name=name,
        memory_bytes=calibration.memory_bytes,
        bytes_per_second=calibration.bytes_per_second,
        flops_per_second=peaks,
        link_bytes_per_second=None,
        source=f"measured on this machine: {calibration.machine}",
        calibration=calibration,
    )
