"""A workload predicted and measured side by side: FLOPs, bytes and peak memory by the counter, seconds by the clock.

for row in compare_with_measurement(workload, calibration): print(row.quantity, row.ratio)
"""

from dataclasses import dataclass

import torch

from clearhead.costs.calibration.measurement import device_memory_bytes
from clearhead.costs.calibration.prediction import can_predict, predict_seconds, uses_packed_kernels
from clearhead.costs.calibration.rates import Calibration
from clearhead.costs.calibration.timing import time_step
from clearhead.costs.calibration.toy_networks import build_packed
from clearhead.costs.formulas import Workload, operation_costs, total_parameters
from clearhead.costs.simulation import (
    KernelCounter,
    Step,
    build_network,
    decode_step,
    estimate_memory,
    prepare_step,
    simulate,
    uses_cuda_graph,
)
from clearhead.errors import ClearheadError
from clearhead.model import Transformer


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured."""

    quantity: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


@dataclass(frozen=True)
class Trial:
    """A workload that is ready to run on this machine, and what one run under the counter has shown."""

    workload: Workload
    step: Step
    comparisons: list[Comparison]


def compare_with_measurement(workload: Workload, calibration: Calibration | None = None) -> list[Comparison]:
    """Run a workload on this machine and return predictions and measurements.

    Seconds are included if the machine is calibrated for this workload.
    """
    trial = prepare_trial(workload)
    if calibration is None or not can_predict(workload, calibration):
        return trial.comparisons
    seconds = time_step(trial.step, workload.device_type)
    return [*trial.comparisons, Comparison("seconds", predict_seconds(workload, calibration), seconds)]


def prepare_trial(workload: Workload) -> Trial:
    """Build the network of a workload, run it once under the counter and return a step that can be timed.

    Raise ClearheadError if this machine cannot run it.
    """
    if workload.gpus > 1:
        raise ClearheadError(f"a measurement runs on one device; leave out gpus, which is {workload.gpus}")
    if workload.is_packed and not uses_packed_kernels(workload):
        raise ClearheadError(
            f"with {workload.weights} weights, only decoding of one sequence on a CPU in int8 or int4 can be measured; "
            f"leave out weights={workload.weights!r}"
        )
    if workload.device_type == "cuda" and not torch.cuda.is_available():
        raise ClearheadError("this machine has no CUDA device to measure on; use --device cpu")
    _check_memory(workload)
    if workload.is_packed:
        return Trial(workload, _packed_step(workload), [])
    bytes_before = _allocated_before_network() if workload.device_type == "cuda" else 0
    network, counter = build_network(workload, workload.device_type), KernelCounter()
    if uses_cuda_graph(workload):  # the counter does not see inside a graph
        step, comparisons = prepare_step(network, workload), []
    else:
        with counter:
            step = prepare_step(network, workload)
            counter.restart()
            step()
        comparisons = _compare_counts(workload, counter)
    full_step, uncounted_bytes = _add_optimizer(network, step) if workload.phase == "train" else (step, 0)
    uncounted_bytes += sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    peak = _measure_peak_bytes(full_step, workload, uncounted_bytes, counter) - bytes_before
    return Trial(workload, full_step, [*comparisons, Comparison("peak bytes", estimate_memory(workload).peak, peak)])


def _check_memory(workload: Workload) -> None:
    """Raise ClearheadError before a run that the operating system would kill.

    A network is created in float32, whatever it is converted to afterwards.
    """
    needed = max(estimate_memory(workload).peak, 4 * total_parameters(workload.config))
    available = device_memory_bytes(workload.device_type)
    if needed > available:
        raise ClearheadError(
            f"this run needs {needed / 1e9:,.1f} GB, but this machine has {available / 1e9:,.1f} GB; "
            "measure a shorter context or a smaller model"
        )


def _packed_step(workload: Workload) -> Step:
    """Return a decode step in our own kernels, which the counter does not see."""
    network = build_packed(workload)
    if network is None:
        raise ClearheadError(
            "the kernels for packed weights cannot be compiled on this machine; install a C++ compiler"
        )
    return decode_step(network, workload)


def _compare_counts(workload: Workload, counter: KernelCounter) -> list[Comparison]:
    flops = sum(cost.flops for cost in operation_costs(workload))
    return [
        Comparison("FLOPs", flops, counter.flops),
        Comparison("bytes moved", simulate(workload).num_bytes, counter.num_bytes),
    ]


def _add_optimizer(network: Transformer, step: Step) -> tuple[Step, int]:
    """Return a training step that ends with AdamW, and the bytes of its moments.

    The fused AdamW is one kernel that reads and writes everything once.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def full_step() -> None:
        step()
        optimizer.step()

    full_step()  # allocates the moments
    moments = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    return full_step, sum(tensor.numel() * tensor.element_size() for tensor in moments)


def _allocated_before_network() -> int:
    """Return the GPU memory in use before the network exists, mainly the workspace of the matrix product library."""
    matrix = torch.ones(64, 64, device="cuda")
    torch.mm(matrix, matrix)
    del matrix
    return torch.cuda.memory_allocated()


def _measure_peak_bytes(step: Step, workload: Workload, uncounted_bytes: int, counter: KernelCounter) -> int:
    """Return the peak memory: the allocator's on CUDA, on a CPU the counter's with weights and moments added."""
    if workload.device_type == "cpu":
        return uncounted_bytes + counter.peak_bytes
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
