"""Predicted beside measured, on this machine: FLOPs, bytes and peak memory by the counter, seconds by the clock.

for row in compare(workload, calibration): print(row.what, row.ratio)
"""

from dataclasses import dataclass

import torch

from clearhead.costs.calibration.calibration import Calibration
from clearhead.costs.calibration.clock import clock
from clearhead.costs.calibration.measure_machine import encoder_output_of
from clearhead.costs.calibration.packed_rates import build_packed, runs_packed
from clearhead.costs.calibration.predict import is_predicted, predict_seconds
from clearhead.costs.formulas.memory import footprint
from clearhead.costs.formulas.operations import operations
from clearhead.costs.formulas.parameters import parameters
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.report import table_rows
from clearhead.costs.simulation.counter import Counter
from clearhead.costs.simulation.layout import lay_out
from clearhead.costs.simulation.workload_steps import Step, build, decoding, in_graph, prepare
from clearhead.errors import ClearheadError
from clearhead.model import Transformer, fused_attention


@dataclass(frozen=True)
class Comparison:
    what: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def require_memory(workload: Workload) -> None:
    """Before a run that the system would kill. A network is made in float32, whatever it is then turned into."""
    needed = max(footprint(workload).peak, 4 * sum(parameters(workload.config).values()))
    held = encoder_output_of(workload.device_type)
    if needed > held:
        raise ClearheadError(
            f"this run needs {needed / 1e9:,.1f} GB, and there are {held / 1e9:,.1f} GB here; "
            "measure a shorter context or a smaller model"
        )


@dataclass(frozen=True)
class Trial:
    """A workload that is ready to run here, and what one run under the counter has shown."""

    workload: Workload
    step: Step
    counted: list[Comparison]


def compare(workload: Workload, calibration: Calibration | None = None) -> list[Comparison]:
    """One run under the counter, then some against the clock; seconds only where the machine is calibrated."""
    trial = begin(workload)
    if calibration is None or not is_predicted(workload, calibration):
        return trial.counted
    measured = clock(trial.step, workload.device_type)
    return [*trial.counted, Comparison("seconds", predict_seconds(workload, calibration), measured)]


def begin(workload: Workload) -> Trial:
    if workload.gpus > 1 or (workload.quant is not None and not runs_packed(workload)):
        raise ClearheadError("measured is one device, with quant only one row decoded on a CPU in int8 or int4")
    if workload.device_type == "cuda" and not torch.cuda.is_available():
        raise ClearheadError("there is no CUDA device here to measure on; say --device cpu")
    require_memory(workload)
    if workload.quant is not None:
        return Trial(workload, packed_step(workload), [])
    others = bytes_of_others() if workload.device_type == "cuda" else 0
    network, counter = build(workload, workload.device_type), Counter()
    if in_graph(workload):  # into which the counter does not see
        step, rows = prepare(network, workload), []
    else:
        with counter:
            step = prepare(network, workload)
            counter.restart()
            step()
        rows = counted(workload, counter)
    whole_step, made_before = with_optimizer(network, step) if workload.phase == "train" else (step, 0)
    made_before += sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    peak = peak_bytes(whole_step, workload, made_before, counter) - others
    return Trial(workload, whole_step, [*rows, Comparison("peak bytes", footprint(workload).peak, peak)])


def packed_step(workload: Workload) -> Step:
    """In kernels of our own, of which the counter sees nothing."""
    network = build_packed(workload)
    if network is None:
        raise ClearheadError("the kernels for packed weights cannot be built here; install a C++ compiler")
    return decoding(network, workload, fused_attention)


def counted(workload: Workload, counter: Counter) -> list[Comparison]:
    flops = sum(row.flops for row in table_rows(operations(workload), workload))
    return [
        Comparison("FLOPs", flops, counter.flops),
        Comparison("bytes moved", lay_out(workload).num_bytes, counter.num_bytes),
    ]


def with_optimizer(network: Transformer, step: Step) -> tuple[Step, int]:
    """A training step ends with AdamW, in one kernel that reads and writes all it needs once; its moments' bytes."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def whole_step() -> None:
        step()
        optimizer.step()

    whole_step()  # makes the moments
    moments = [part for state in optimizer.state.values() for name, part in state.items() if name != "step"]
    return whole_step, sum(part.numel() * part.element_size() for part in moments)


def bytes_of_others() -> int:
    """What is on the GPU before the network is: above all the workspace of the library for products."""
    side = torch.ones(64, 64, device="cuda")
    torch.mm(side, side)
    del side
    return torch.cuda.memory_allocated()


def peak_bytes(step: Step, workload: Workload, made_before: int, counter: Counter) -> int:
    """On CUDA what the allocator says; on the CPU what the counter saw, and weights and moments beside it."""
    if workload.device_type == "cpu":
        return made_before + counter.peak_bytes
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
