"""Join and leave the group of all processes, and collective operations, which all processes must call.

    texts = gather_texts("text of this process", torch.device("cpu"))    # in the order of the ranks

torch.distributed's collectives for objects pickle what they send, and unpickling what another process has sent runs its
code. So texts travel as tensors of bytes.
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as torch_distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.errors import ClearheadError

T = TypeVar("T")


def join_group(device: torch.device, timeout: timedelta | None = None) -> None:
    """Join the processes that torchrun has started: with NCCL if this process computes on a GPU, else with gloo.

    timeout: how long an operation waits for the other processes; None is PyTorch's default.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch_distributed.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        torch_distributed.init_process_group("gloo", timeout=timeout)


def leave_group(uses_gloo: bool) -> None:
    """Destroy the default group and all others. uses_gloo: whether one of them sends with gloo."""
    if uses_gloo:
        # gloo's thread needs the interpreter lock to release the last tensors it sent, but destroying the group
        # holds that lock while it waits for the thread, and hangs (torch 2.13). Let the thread finish first.
        time.sleep(0.2)
    torch_distributed.destroy_process_group()


def run_everywhere(action: Callable[[], T], gather: Callable[[str], list[str]]) -> list[T]:
    """Run an action in each process and return the results of all, which must be JSON values.

    If it raises a ClearheadError in one process, all processes raise it. gather: as gather_texts.
    """
    outcome: dict[str, object]
    try:
        outcome = {"result": action()}
    except ClearheadError as error:
        outcome = {"error": str(error)}
    outcomes = [json.loads(text) for text in gather(json.dumps(outcome))]
    for each in outcomes:
        if "error" in each:
            raise ClearheadError(each["error"])
    return [each["result"] for each in outcomes]


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    torch_distributed.all_reduce(tensor)
    return tensor


def gather_texts(text: str, device: torch.device, group: ProcessGroup | None = None) -> list[str]:
    """Return the texts of all processes. device: where the group sends tensors from (a GPU with NCCL)."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    size = torch_distributed.get_world_size(group)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(size)]
    torch_distributed.all_gather(lengths, torch.tensor([len(own)], device=device), group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = own.to(device)
    parts = [torch.empty_like(padded) for _ in range(size)]
    torch_distributed.all_gather(parts, padded, group)
    pairs = zip(parts, lengths, strict=True)
    return [bytes(part[: int(length)].tolist()).decode() for part, length in pairs]
