"""How work grows with the length n: lines from formulas, points counted and measured (book F4).

    draw_curves(measure_curves(load_calibration("cpu")), Path("curves.png"))

Transformer, whole sequence     O(n²)    every token attends to every other
Transformer, one cached token   O(n)     one query attends to n keys
RNN, whole sequence             O(n)     one state after the other
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from clearhead.costs.calibration import UNUSUAL_HEAD_WIDTH, Calibration, predict_seconds, time_step, toy_llama
from clearhead.costs.formulas import Phase, Workload, operation_costs
from clearhead.costs.simulation import KernelCounter, build_network, prepare_step
from clearhead.errors import ClearheadError
from clearhead.model import RecurrentConfig, RecurrentTranslator

LENGTHS = (64, 128, 256, 512, 1024, 2048)
MEASURED_SECONDS = 0.3  # per point


@dataclass(frozen=True)
class Point:
    """The work at one length: FLOPs by formula and by the counter, seconds predicted and measured."""

    length: int
    flops: int
    counted_flops: int
    seconds: float | None  # None: not predicted
    measured_seconds: float


@dataclass(frozen=True)
class Curve:
    """The points of one network."""

    name: str
    points: list[Point]


def measure_curves(calibration: Calibration, lengths: Sequence[int] = LENGTHS) -> list[Curve]:
    """Count and measure a toy Transformer and a toy RNN at several lengths on a calibrated machine."""
    prefill = [transformer_point("prefill", length, calibration) for length in lengths]
    decode = [transformer_point("decode", length, calibration) for length in lengths]
    recurrent = [_recurrent_point(length, calibration.device) for length in lengths]
    return [
        Curve("Transformer, whole sequence: O(n²)", prefill),
        Curve("Transformer, one cached token: O(n)", decode),
        Curve("RNN, whole sequence: O(n)", recurrent),
    ]


def transformer_point(phase: Phase, length: int, calibration: Calibration) -> Point:
    """Measure a Transformer in PyTorch's own kernels, since the counter does not see inside a CUDA graph."""
    on_cpu = calibration.device == "cpu"
    workload = Workload(
        config=replace(toy_llama(UNUSUAL_HEAD_WIDTH), context=length),
        phase=phase,
        context=length,
        source=length,
        dtype="float32" if on_cpu else "bfloat16",
        device_type="cpu" if on_cpu else "cuda",
    )
    flops = sum(operation.flops for operation in operation_costs(workload))
    step = prepare_step(build_network(workload, calibration.device), workload)
    return _measure_point(length, flops, predict_seconds(workload, calibration), step, calibration.device)


@torch.no_grad()
def _recurrent_point(length: int, device: str) -> Point:
    """Measure the encoder of an RNN. A GRU has three gates, each with a matrix for the input and one for the state.

    Its seconds are not predicted: the loop runs inside torch, where an operation takes less time than from Python, and
    that time is not calibrated.
    """
    width = toy_llama().width
    config = RecurrentConfig(
        source_vocab_size=64,
        target_vocab_size=64,
        embedding_width=width,
        width=width,
        cell="gru",
        attention="none",
        context=length,
    )
    with torch.device(device):
        network, source = RecurrentTranslator(config).eval(), torch.zeros(1, length, dtype=torch.long)
    flops = 2 * length * 3 * (width + width) * width
    return _measure_point(length, flops, None, lambda: network.encode(source), device)


def _measure_point(length: int, flops: int, seconds: float | None, step: Callable[[], object], device: str) -> Point:
    with KernelCounter() as counter:
        step()
    return Point(length, flops, counter.flops, seconds, time_step(step, device, MEASURED_SECONDS))


def draw_curves(curves: Iterable[Curve], path: Path) -> None:
    """Draw FLOPs and seconds over the length into a picture file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ClearheadError('a plot needs matplotlib; run: pip install "clearhead[plot]"') from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    flops_axes, seconds_axes = figure.subplots(1, 2)
    for number, curve in enumerate(curves):
        color, lengths = f"C{number}", [point.length for point in curve.points]
        flops_axes.plot(lengths, [point.flops for point in curve.points], color=color, label=curve.name)
        flops_axes.plot(lengths, [point.counted_flops for point in curve.points], "o", color=color)
        if all(point.seconds is not None for point in curve.points):
            seconds_axes.plot(lengths, [point.seconds for point in curve.points], color=color)
        seconds_axes.plot(lengths, [point.measured_seconds for point in curve.points], "o", color=color)
    for axes, title in (
        (flops_axes, "FLOPs: lines by formula, points counted"),
        (seconds_axes, "seconds: lines predicted, points measured"),
    ):
        axes.set(xscale="log", yscale="log", xlabel="length n in tokens", title=title)
        axes.grid(alpha=0.3)
    flops_axes.legend()
    figure.savefig(path, dpi=150)
