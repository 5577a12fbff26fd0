"""Time and memory predicted from the config against what this machine does: a table of both, nothing left out.

    python benchmarks/predict.py cuda results              # writes results/predict-cuda.json and .md, in two minutes
    for phase in decode prefill train; do python benchmarks/predict.py cpu results $phase; done

CUDA: shapes of 124M, 1B and 8B in bfloat16; where generation decodes in a CUDA graph, so does this. Training keeps
weights, gradients and AdamW's moments in bfloat16, 8 bytes a parameter: 8B with its activations fits in 139 GiB.

CPU: SmolLM2-135M in float32. A shared machine's speed moves within a minute, so it is measured before and after the
runs, best phase by phase: what is predicted is the mean of both, and `moved` is the later over the earlier.
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

from clearhead.cost.calibrate import measure_machine
from clearhead.cost.calibration import Calibration
from clearhead.cost.measure import compare
from clearhead.cost.predict import predict_seconds
from clearhead.cost.running import in_graph
from clearhead.cost.workload import Workload
from clearhead.families import preset
from clearhead.training.learner import keep_freed_memory

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


def compared(workload: Workload, before: Calibration) -> list[Row]:
    """A run that fails is a row too."""
    try:
        return [asdict(found) | {"ratio": found.ratio} for found in compare(workload, before)]
    except (RuntimeError, ValueError) as error:  # out of memory, no kernel for a shape, a clear refusal
        return [{"what": f"failed: {str(error).splitlines()[0]}"}]


def predicted_again(row: Row, workload: Workload, after: Calibration) -> Row:
    if row["what"] != "seconds":
        return row
    earlier, later = row["predicted"], predict_seconds(workload, after)
    mean = statistics.geometric_mean((earlier, later))
    return row | {"predicted": mean, "ratio": mean / row["measured"], "moved": later / earlier}


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
    if "train" in phases:
        keep_freed_memory()  # as training does
    before = measure_machine(device, dtypes=[DTYPES[device]])
    calibrated = time.perf_counter() - started
    found: list[tuple[Row, Workload, list[Row]]] = []
    for described, workload in workloads(device, phases):
        found.append((described, workload, compared(workload, before)))
        print(described, f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    after = measure_machine(device, dtypes=[DTYPES[device]]) if device == "cpu" else before
    rows = [described | predicted_again(row, workload, after) for described, workload, rows in found for row in rows]
    about: Row = {
        "machine": before.machine,
        "torch": torch.__version__,
        "calibration_seconds": round(calibrated, 1),
        "all_seconds": round(time.perf_counter() - started, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(["predict", device, *(phases if len(phases) < len(PHASES) else ())])
    data = about | {"rows": rows, "calibration": asdict(before)}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    text = markdown(rows, about)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(about))


if __name__ == "__main__":
    device, folder, *phases = [*sys.argv[1:], *("cpu", "results")[len(sys.argv) - 1 :]]
    main(device, Path(folder), phases or PHASES)
