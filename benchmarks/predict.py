"""Time and memory predicted from the config against what this machine does: a table of both, nothing left out.

    python benchmarks/predict.py cuda results              # writes results/predict-cuda.json and .md, in three minutes
    for phase in decode prefill train; do python benchmarks/predict.py cpu results $phase; done

CUDA: shapes of 124M, 1B and 8B in bfloat16; where generation decodes in a CUDA graph, so does this. Training keeps
weights, gradients and AdamW's moments in bfloat16, 8 bytes a parameter: 8B with its activations fits in 139 GiB. The
host's speed moves too: where it launches the kernels, it is measured in turns with the runs, and the fastest of each
counts.

CPU: SmolLM2-135M in float32, with freed memory kept, as `clearhead train` does. The speed of a shared machine moves
within seconds, so calibration and runs take turns, and what counts is the fastest of each; `moved` is the median run
over the fastest.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from clearhead.costs import (
    Calibration,
    Comparison,
    Workload,
    begin,
    clock,
    fastest,
    host_seconds,
    in_graph,
    measure_machine,
    measure_once,
    predict_seconds,
    several_seconds,
)
from clearhead.families import preset
from clearhead.training import keep_freed_memory

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
# model, phase, batch, context
RUNS = {
    "cuda": (
        ("gpt2", "decode", 1, 1024),
        ("gpt2", "prefill", 8, 1024),
        ("gpt2", "train", 16, 1024),
        ("llama-3.2-1b", "decode", 1, 2048),
        ("llama-3.2-1b", "decode", 64, 2048),
        ("llama-3.2-1b", "prefill", 4, 2048),
        ("llama-3.2-1b", "train", 4, 2048),
        ("llama-3.1-8b", "decode", 1, 2048),
        ("llama-3.1-8b", "decode", 32, 2048),
        ("llama-3.1-8b", "prefill", 1, 8192),
        ("llama-3.1-8b", "train", 1, 4096),
    ),
    "cpu": (
        ("smollm2-135m", "decode", 1, 128),
        ("smollm2-135m", "decode", 1, 512),
        ("smollm2-135m", "decode", 1, 2048),
        ("smollm2-135m", "prefill", 1, 128),
        ("smollm2-135m", "prefill", 1, 512),
        ("smollm2-135m", "train", 1, 128),
        ("smollm2-135m", "train", 4, 64),
    ),
}
PHASES = ("decode", "prefill", "train")
TURNS_SECONDS, TURN_SECONDS = 60, 1.5  # CPU
NUM_TURNS, CLOCK_SECONDS = 3, 1.0  # CUDA
COLUMNS = ("model", "phase", "batch", "context", "runs", "what", "predicted", "measured", "ratio", "moved")

Row = dict[str, Any]


def workloads(device: str, phases: Sequence[str]) -> Iterator[tuple[Row, Workload]]:
    for name, phase, batch, context in RUNS[device]:
        if phase not in phases:
            continue
        workload = Workload(
            config=preset(name),
            phase=phase,
            batch=batch,
            context=context,
            source=context,
            dtype=DTYPES[device],
            device_type=device,
        )
        runs = "graph" if in_graph(workload) else "eager"
        yield {"model": name, "phase": phase, "batch": batch, "context": context, "runs": runs}, workload


def one_by_one(device: str, planned: list[tuple[Row, Workload]]) -> tuple[Calibration, list[Row]]:
    calibration = measure_machine(device, dtypes=[DTYPES[device]])
    found = []
    for described, workload in planned:
        try:
            rows = [told(row) for row in compare_in_turns(workload, calibration, described["runs"] == "eager")]
        except (RuntimeError, ValueError) as error:  # out of memory, no kernel for a shape, a clear refusal
            rows = [{"what": f"failed: {str(error).splitlines()[0]}"}]
        found += [described | row for row in rows]
        print(described, file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return calibration, found


def compare_in_turns(workload: Workload, calibration: Calibration, by_host: bool) -> list[Comparison]:
    """As `compare`, but where the host launches each kernel, it is measured again before each of some runs."""
    trial = begin(workload)
    predicted, measured = [], []
    for _ in range(NUM_TURNS if by_host else 1):
        if by_host:
            calibration.host_seconds[workload.phase] = host_seconds(workload.device_type, workload.phase)
        predicted.append(predict_seconds(workload, calibration))
        measured.append(clock(trial.step, workload.device_type, CLOCK_SECONDS))
    return [*trial.counted, Comparison("seconds", min(predicted), min(measured))]


def in_turns(device: str, planned: list[tuple[Row, Workload]]) -> tuple[Calibration, list[Row]]:
    trials = [begin(workload) for _, workload in planned]
    passes: list[Calibration] = []
    times: list[list[float]] = [[] for _ in trials]
    started = time.perf_counter()
    while time.perf_counter() - started < TURNS_SECONDS:
        passes.append(measure_once(device, lambda what: None, [DTYPES[device]]))
        for trial, taken in zip(trials, times, strict=True):
            begun = time.perf_counter()
            while time.perf_counter() - begun < TURN_SECONDS:
                taken.append(several_seconds(trial.step, device, 1))
        print(f"turn {len(passes)}", *(f"{min(taken):.4g} s" for taken in times), file=sys.stderr, flush=True)
    calibration = fastest(passes)
    found = []
    for (described, workload), trial, taken in zip(planned, trials, times, strict=True):
        clocked = Comparison("seconds", predict_seconds(workload, calibration), min(taken))
        rows = [*map(told, trial.counted), told(clocked) | {"moved": statistics.median(taken) / min(taken)}]
        found += [described | row for row in rows]
    return calibration, found


def told(found: Comparison) -> Row:
    return asdict(found) | {"ratio": found.ratio}


def markdown(found: list[Row], about: Row) -> str:
    lines = [f"{key}: {value}" for key, value in about.items()]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in found:
        cells = [row.get(column, "") for column in COLUMNS]
        lines.append(
            "| " + " | ".join(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def main(device: str, folder: Path, phases: Sequence[str]) -> None:
    started = time.perf_counter()
    planned = list(workloads(device, phases))
    if device == "cpu":
        keep_freed_memory()
        calibration, rows = in_turns(device, planned)
    else:
        calibration, rows = one_by_one(device, planned)
    about: Row = {
        "machine": calibration.machine,
        "torch": torch.__version__,
        "all_seconds": round(time.perf_counter() - started, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(["predict", device, *(phases if len(phases) < len(PHASES) else ())])
    data = about | {"rows": rows, "calibration": asdict(calibration)}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    text = markdown(rows, about)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(about))


if __name__ == "__main__":
    device, folder, *phases = [*sys.argv[1:], *("cpu", "results")[len(sys.argv) - 1 :]]
    main(device, Path(folder), phases or PHASES)
