"""What a run writes down: one JSON row for each logged step, and how fast it went.

    journal = Journal(folder, first_step=0); journal.write({"step": 10, "loss": 2.5})     # metrics.jsonl

MFU, the share of the device's peak that went into the model's own arithmetic, counts 6N + 12·L·D·T operations a token
(PaLM, appendix B): N the weights that multiply, so without the input table unless it is the head too, and attention
not halved for the causal mask.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import ClearheadError
from clearhead.files import parse_json
from clearhead.model.transformer import Transformer

# Dense bfloat16 operations a second by a part of the device's name (the vendor's data sheets, without sparsity)
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "RTX 4090": 165e12, "L40S": 362e12}
METRICS = "metrics.jsonl"


def flops_per_token(network: Transformer, length: int) -> float:
    """Of one training step of a decoder alone, forward and backward."""
    config = network.config
    tables = network.decoder.embedding if network.decoder is not None else None
    assert tables is not None
    num_weights = sum(parameter.numel() for parameter in network.parameters())
    num_weights -= sum(part.weight.numel() for part in (tables.positions, tables.types) if part is not None)
    if config.head is None or not config.head.tied:
        num_weights -= tables.tokens.weight.numel()
    return 6.0 * num_weights + 12.0 * len(config.output_stack.layers) * config.width * length


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class Meter:
    """Tokens and seconds since it was last read."""

    def __init__(self, network: torch.nn.Module, device: torch.device):
        self.device, self.peak = device, peak_flops(device)
        alone = isinstance(network, Transformer) and network.encoder is None
        self.network = network if alone and isinstance(network, Transformer) else None
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
        if self.peak is not None and self.network is not None:
            row["mfu"] = row["tokens_per_second"] * flops_per_token(self.network, length) / self.peak
        if self.device.type == "cuda":
            row["memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self.restart()
        return row


class Journal:
    """metrics.jsonl and, where asked for, TensorBoard. A resumed run forgets rows of steps it makes again."""

    def __init__(self, folder: Path, first_step: int, tensorboard: bool = False):
        self.path = folder / METRICS
        self.path.write_text(
            "".join(f"{json.dumps(row)}\n" for row in read_metrics(folder) if row["step"] <= first_step)
        )
        self.board = open_tensorboard(folder, first_step) if tensorboard else None

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
