"""Record the metrics of a run in metrics.jsonl, and measure its speed.

    log = MetricsLog(folder, first_step=0); log.write({"step": 10, "loss": 2.5})

MFU (model FLOPs utilization) is the share of the device's peak performance that the model's own arithmetic achieves. It
is computed as in costs/estimate.py, by PaLM's convention: attention is not halved for the causal mask.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch

from clearhead.architecture import ModelConfig
from clearhead.costs import Workload, device_for_gpu, model_flops
from clearhead.files import write_text
from clearhead.model import Transformer
from clearhead.training.trackers import Tracker

METRICS_FILE = "metrics.jsonl"


def flops_per_token(config: ModelConfig, length: int) -> int:
    """Return the FLOPs of a training step per token, for rows of this length. Only chosen experts count."""
    return model_flops(Workload(config=config, phase="train", context=length, source=length)).palm_flops_per_token


def _peak_flops(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a GPU in bfloat16, or None if it is not known."""
    known = device_for_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.peak("bfloat16")


class ThroughputMeter:
    """Counts tokens and seconds since it was last read."""

    def __init__(self, network: torch.nn.Module, device: torch.device):
        self.device, self.peak = device, _peak_flops(device)
        self.config = network.config if isinstance(network, Transformer) and network.encoder is None else None
        self.restart()

    def restart(self) -> None:
        """Start counting again from zero."""
        self.started, self.num_tokens, self.num_steps = time.perf_counter(), 0, 0

    def count_step(self, num_tokens: int) -> None:
        """Count one step."""
        self.num_tokens += num_tokens
        self.num_steps += 1

    def read(self, length: int, num_steps_left: int) -> dict[str, float]:
        """Return the metrics since the last reading and restart. `length` is the number of tokens in a row."""
        seconds = time.perf_counter() - self.started
        row = {
            "tokens_per_second": self.num_tokens / seconds,
            "seconds_left": seconds / self.num_steps * num_steps_left,
        }
        if self.peak is not None and self.config is not None:
            row["mfu"] = row["tokens_per_second"] * flops_per_token(self.config, length) / self.peak
        if self.device.type == "cuda":
            row["memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self.restart()
        return row


class MetricsLog:
    """Appends rows to metrics.jsonl and, if there is one, to a tracker.

    A resumed run deletes the rows of the steps that it repeats.
    """

    def __init__(self, folder: Path, first_step: int, tracker: Tracker | None = None):
        self.path, self.tracker = folder / METRICS_FILE, tracker
        rows = [row for row in read_metrics(folder) if row["step"] <= first_step]
        write_text(self.path, "".join(f"{json.dumps(row)}\n" for row in rows))

    def write(self, row: dict[str, Any]) -> None:
        """Append a row, which has a `step` and any other numbers."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.tracker is not None:
            self.tracker.log({name: value for name, value in row.items() if name != "step"}, row["step"])

    def close(self) -> None:
        """Close the tracker."""
        if self.tracker is not None:
            self.tracker.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl. Damaged lines and one that a killed run left incomplete are skipped."""
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    rows = [_parse_row(line) for line in path.read_bytes().split(b"\n")]
    return [row for row in rows if row is not None]


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Return a row: an object of numbers with a `step`. Return None if the line is anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # ValueError also for bytes that are not UTF-8
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int
    return row if is_row and all(type(value) in (int, float) for value in row.values()) else None
