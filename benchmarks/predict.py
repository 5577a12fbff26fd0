"""Compare time and memory predicted from the config with measurements on this machine, in one table of all runs.

    python benchmarks/predict.py cuda results              # writes results/predict-cuda.json and .md, in three minutes
    for phase in decode prefill train; do python benchmarks/predict.py cpu results $phase; done

CUDA: models of 124M, 1B and 8B parameters in bfloat16, decoded in a CUDA graph if generation does so. Training keeps
weights, gradients and AdamW's moments in bfloat16, 8 bytes per parameter: 8B with its activations fits into 139 GiB.
The speed of the host varies too, so if the host launches the kernels, it is measured in alternation with the runs, and
the fastest of each counts.

CPU: SmolLM2-135M in float32, with freed memory kept, as in `clearhead train`. The speed of a shared machine varies
within seconds, so calibration and runs alternate, and the fastest of each counts; `variation` is the median run divided
by the fastest.
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

from clearhead.costs import Workload, measure_machine
from clearhead.costs.calibration import (
    Calibration,
    Comparison,
    best_of,
    measure_host_seconds,
    measure_once,
    predict_seconds,
    prepare_trial,
    time_repeats,
    time_step,
)
from clearhead.costs.simulation import uses_cuda_graph
from clearhead.families import preset
from clearhead.training import reuse_freed_memory

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
TOTAL_SECONDS, RUN_SECONDS = 60, 1.5  # CPU: of all rounds, and of one workload in a round
NUM_ROUNDS, STEP_SECONDS = 3, 1.0  # CUDA
COLUMNS = ("model", "phase", "batch", "context", "execution", "quantity", "predicted", "measured", "ratio", "variation")

Row = dict[str, Any]


def planned_workloads(device: str, phases: Sequence[str]) -> Iterator[tuple[Row, Workload]]:
    """Yield each workload with the columns of the table that describe it."""
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
        execution = "graph" if uses_cuda_graph(workload) else "eager"
        yield {"model": name, "phase": phase, "batch": batch, "context": context, "execution": execution}, workload


# --- CUDA


def measure_one_by_one(device: str, planned: list[tuple[Row, Workload]]) -> tuple[Calibration, list[Row]]:
    """Calibrate once, then measure one workload after the other; a failure becomes a row of the table."""
    calibration = measure_machine(device, dtypes=[DTYPES[device]])
    table = []
    for description, workload in planned:
        try:
            comparisons = compare_workload(workload, calibration, launched_by_host=description["execution"] == "eager")
            rows = [to_row(comparison) for comparison in comparisons]
        except (RuntimeError, ValueError) as error:  # out of memory, no kernel for a shape, a ClearheadError
            rows = [{"quantity": f"failed: {str(error).splitlines()[0]}"}]
        table += [description | row for row in rows]
        print(description, file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return calibration, table


def compare_workload(workload: Workload, calibration: Calibration, launched_by_host: bool) -> list[Comparison]:
    """Compare as `compare_with_measurement` does; if the host launches the kernels, measure it again in each round."""
    trial = prepare_trial(workload)
    predicted, measured = [], []
    for _ in range(NUM_ROUNDS if launched_by_host else 1):
        if launched_by_host:
            calibration.host_seconds[workload.phase] = measure_host_seconds(workload.device_type, workload.phase)
        predicted.append(predict_seconds(workload, calibration))
        measured.append(time_step(trial.step, workload.device_type, STEP_SECONDS))
    return [*trial.comparisons, Comparison("seconds", min(predicted), min(measured))]


# --- CPU


def measure_in_rounds(device: str, planned: list[tuple[Row, Workload]]) -> tuple[Calibration, list[Row]]:
    """Alternate calibration and all workloads, and compare the fastest of each."""
    trials = [prepare_trial(workload) for _, workload in planned]
    passes: list[Calibration] = []
    times: list[list[float]] = [[] for _ in trials]
    started = time.perf_counter()
    while time.perf_counter() - started < TOTAL_SECONDS:
        passes.append(measure_once(device, [DTYPES[device]]))
        for trial, trial_times in zip(trials, times, strict=True):
            run_started = time.perf_counter()
            while time.perf_counter() - run_started < RUN_SECONDS:
                trial_times.append(time_repeats(trial.step, device, 1))
        fastest = [f"{min(trial_times):.4g} s" for trial_times in times]
        print(f"round {len(passes)}", *fastest, file=sys.stderr, flush=True)
    calibration = best_of(passes)
    table = []
    for (description, workload), trial, trial_times in zip(planned, trials, times, strict=True):
        seconds = Comparison("seconds", predict_seconds(workload, calibration), min(trial_times))
        variation = statistics.median(trial_times) / min(trial_times)
        rows = [*map(to_row, trial.comparisons), to_row(seconds) | {"variation": variation}]
        table += [description | row for row in rows]
    return calibration, table


# --- output


def to_row(comparison: Comparison) -> Row:
    return asdict(comparison) | {"ratio": comparison.ratio}


def to_markdown(table: list[Row], about: Row) -> str:
    lines = [f"{key}: {value}" for key, value in about.items()]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in table:
        cells = [row.get(column, "") for column in COLUMNS]
        texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main(device: str, folder: Path, phases: Sequence[str]) -> None:
    started = time.perf_counter()
    planned = list(planned_workloads(device, phases))
    if device == "cpu":
        reuse_freed_memory()
        calibration, table = measure_in_rounds(device, planned)
    else:
        calibration, table = measure_one_by_one(device, planned)
    about: Row = {
        "machine": calibration.machine,
        "torch": torch.__version__,
        "all_seconds": round(time.perf_counter() - started, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(["predict", device, *(phases if len(phases) < len(PHASES) else ())])
    data = about | {"rows": table, "calibration": asdict(calibration)}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    text = to_markdown(table, about)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(about))


if __name__ == "__main__":
    device, folder, *phases = [*sys.argv[1:], *("cpu", "results")[len(sys.argv) - 1 :]]
    main(device, Path(folder), phases or PHASES)
