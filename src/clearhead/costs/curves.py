"""How work grows with the length n: lines from formulas, points from the counter and the clock (book F4).

draw(curves(load_calibration("cpu")), Path("curves.png"))

Transformer, whole sequence   O(n²)    every token looks at every other
Transformer, one cached token O(n)     one query looks at n keys
RNN, whole sequence           O(n)     one state after the other
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from clearhead.costs.calibration.calibration import Calibration
from clearhead.costs.calibration.clock import clock
from clearhead.costs.calibration.host import UNUSUAL, toy
from clearhead.costs.calibration.predict import predict_seconds
from clearhead.costs.formulas.operations import operations
from clearhead.costs.formulas.workload import Phase, Workload
from clearhead.costs.simulation.counter import Counter
from clearhead.costs.simulation.workload_steps import build, prepare
from clearhead.errors import ClearheadError
from clearhead.model import RecurrentConfig, RecurrentTranslator

LENGTHS = (64, 128, 256, 512, 1024, 2048)
CLOCK_SECONDS = 0.3


@dataclass(frozen=True)
class Point:
    length: int
    flops: int
    counted_flops: int
    seconds: float | None  # None: not predicted
    measured_seconds: float


@dataclass(frozen=True)
class Curve:
    name: str
    points: list[Point]


def measure_curves(calibration: Calibration, lengths: Sequence[int] = LENGTHS) -> list[Curve]:
    whole = [transformer_point("prefill", length, calibration) for length in lengths]
    token = [transformer_point("decode", length, calibration) for length in lengths]
    recurrent = [recurrent_point(length, calibration.device) for length in lengths]
    return [
        Curve("Transformer, whole sequence: O(n²)", whole),
        Curve("Transformer, one cached token: O(n)", token),
        Curve("RNN, whole sequence: O(n)", recurrent),
    ]


def transformer_point(phase: Phase, length: int, calibration: Calibration) -> Point:
    """In PyTorch's own kernels: the counter sees nothing of a CUDA graph."""
    on_cpu = calibration.device == "cpu"
    workload = Workload(
        config=replace(toy(UNUSUAL), context=length),
        phase=phase,
        context=length,
        source=length,
        dtype="float32" if on_cpu else "bfloat16",
        device_type="cpu" if on_cpu else "cuda",
    )
    flops = sum(operation.flops * operation.times for operation in operations(workload))
    step = prepare(build(workload, calibration.device), workload)
    return measured_point(length, flops, predict_seconds(workload, calibration), step, calibration.device)


@torch.no_grad()
def recurrent_point(length: int, device: str) -> Point:
    """The encoder: a GRU has three gates, each with a matrix for the input and one for the state.

    Its loop runs inside torch, where an operation costs less than from Python; how much less is not measured.
    """
    width = toy().width
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
    return measured_point(length, flops, None, lambda: network.encode(source), device)


def measured_point(length: int, flops: int, seconds: float | None, step: Callable[[], object], device: str) -> Point:
    with Counter() as counter:
        step()
    return Point(length, flops, counter.flops, seconds, clock(step, device, CLOCK_SECONDS))


def draw_curves(drawn: Iterable[Curve], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ClearheadError('a plot needs matplotlib: pip install "clearhead[plot]"') from None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    work, clocked = figure.subplots(1, 2)
    for number, curve in enumerate(drawn):
        color, lengths = f"C{number}", [point.length for point in curve.points]
        work.plot(lengths, [point.flops for point in curve.points], color=color, label=curve.name)
        work.plot(lengths, [point.counted_flops for point in curve.points], "o", color=color)
        if all(point.seconds is not None for point in curve.points):
            clocked.plot(lengths, [point.seconds for point in curve.points], color=color)
        clocked.plot(lengths, [point.measured_seconds for point in curve.points], "o", color=color)
    for axes, title in ((work, "FLOPs: lines by formula, points counted"), (clocked, "seconds: predicted, measured")):
        axes.set(xscale="log", yscale="log", xlabel="length n in tokens", title=title)
        axes.grid(alpha=0.3)
    work.legend()
    figure.savefig(path, dpi=150)
