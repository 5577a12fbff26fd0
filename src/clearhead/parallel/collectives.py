"""Collective operations: all processes of a group must call them.

    texts = gather_texts("text of this process", torch.device("cpu"))    # in the order of the ranks

torch.distributed's collectives for objects pickle what they send, and unpickling what another process has sent runs its
code. So texts travel as tensors of bytes.
"""

import torch
import torch.distributed as torch_distributed
from torch import Tensor
from torch.distributed import ProcessGroup


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
