"""What a run writes down: one JSON row for each logged step, and how fast it went.

    journal = Journal(folder, first_step=0); journal.write({"step": 10, "loss": 2.5})     # metrics.jsonl

MFU is the share of the device's peak that went into the model's own arithmetic, counted as costs/report.py counts it by
PaLM's convention: attention is not halved for the causal mask.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch

from clearhead.architecture import ModelConfig
from clearhead.costs import Workload, device_named, utilization
from clearhead.errors import ClearheadError
from clearhead.files import parse_json, write_text
from clearhead.model import Transformer

METRICS = "metrics.jsonl"


def flops_per_token(config: ModelConfig, length: int) -> int:
    """Of one training step, forward and backward, over rows of this length; of a mixture what its tokens choose."""
    return utilization(Workload(config=config, phase="train", context=length, source=length)).palm_flops_per_token


def peak_flops(device: torch.device) -> float | None:
    known = device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.peak("bfloat16")


class Meter:
    """Tokens and seconds since it was last read."""

    def __init__(self, network: torch.nn.Module, device: torch.device):
        self.device, self.peak = device, peak_flops(device)
        self.config = network.config if isinstance(network, Transformer) and network.encoder is None else None
        self.restart()

    def restart(self) -> None:
        self.started, self.num_tokens, self.num_steps = time.perf_counter(), 0, 0

    def count(self, num_tokens: int) -> None:
        """Once for each step."""
        self.num_tokens += num_tokens
        self.num_steps += 1

    def read(self, length: int, num_steps_left: int) -> dict[str, float]:
        """Rows are `length` tokens long."""
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


class Journal:
    """metrics.jsonl and, where asked for, TensorBoard. A resumed run forgets rows of steps it makes again."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False):
        self.board = open_tensorboard(folder, first_step) if tensorboard else None
        self.path = folder / METRICS
        kept = [row for row in read_metrics(folder) if row["step"] <= first_step]
        write_text(self.path, "".join(f"{json.dumps(row)}\n" for row in kept))

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if name != "step":
                    self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Whole rows only: a kill may have cut the last one short."""
    path = folder / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [parse_json(line, f"a line of {path} is ") for line in lines if line.endswith("}")]


def open_tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ClearheadError('TensorBoard is not installed; pip install "clearhead[train]" brings it') from None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
