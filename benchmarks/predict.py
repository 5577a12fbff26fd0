"""Time and memory predicted from the config against what this machine does: a table of both, nothing left out.

    python benchmarks/predict.py cuda results      # writes results/predict-cuda.json and .md, in about two minutes

Calibrates first, so that prediction and measurement meet the same machine. CUDA: shapes of 124M, 1B and 8B in
bfloat16; CPU: SmolLM2-135M in float32.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from clearhead.cost.calibrate import measure_machine
from clearhead.cost.calibration import Calibration
from clearhead.cost.measure import compare
from clearhead.cost.workload import Workload
from clearhead.families import preset

# model, phase, batch, context
CUDA_RUNS = (
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
)
CPU_RUNS = (
    ("smollm2-135m", "decode", 1, 512),
    ("smollm2-135m", "prefill", 1, 256),
    ("smollm2-135m", "train", 1, 128),
)


def workloads(device: str) -> Iterator[tuple[str, Workload]]:
    dtype = "float32" if device == "cpu" else "bfloat16"
    for name, phase, batch, context in CPU_RUNS if device == "cpu" else CUDA_RUNS:
        yield (
            name,
            Workload(
                config=preset(name),
                phase=phase,
                batch=batch,
                context=context,
                source=context,
                dtype=dtype,
                device_type=device,
            ),
        )


def rows(device: str, calibration: Calibration) -> Iterator[dict[str, object]]:
    for name, workload in workloads(device):
        about = {key: getattr(workload, key) for key in ("phase", "batch", "context", "dtype")}
        for found in compare(workload, calibration):
            yield {"model": name} | about | asdict(found) | {"ratio": found.ratio}
        if device == "cuda":
            torch.cuda.empty_cache()


def markdown(found: list[dict[str, object]], about: dict[str, object]) -> str:
    lines = [f"{key}: {value}" for key, value in about.items()]
    lines += ["", "| model | phase | batch | context | what | predicted | measured | ratio |", "|" + "---|" * 8]
    for row in found:
        cells = [str(row[key]) for key in ("model", "phase", "batch", "context", "what")]
        cells += [f"{row[key]:.5g}" for key in ("predicted", "measured")] + [f"{row['ratio']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(device: str, folder: Path) -> None:
    started = time.perf_counter()
    calibration = measure_machine(device)
    calibrated = time.perf_counter() - started
    found = list(rows(device, calibration))
    about: dict[str, object] = {
        "machine": calibration.machine,
        "torch": torch.__version__,
        "calibration_seconds": round(calibrated, 1),
        "all_seconds": round(time.perf_counter() - started, 1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = about | {"rows": found, "calibration": asdict(calibration)}
    (folder / f"predict-{device}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    text = markdown(found, about)
    (folder / f"predict-{device}.md").write_text(text, encoding="utf-8")
    print(text)
    print(json.dumps(about))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu", Path(sys.argv[2] if len(sys.argv) > 2 else "results"))
