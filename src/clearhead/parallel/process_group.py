"""ProcessGroup: the processes of one server, and the messages with which the first one leads the others.

    with ProcessGroup.start() as group:                                      # torchrun --nproc-per-node 2 ...
        model = group.run_everywhere(lambda: load("smollm2"))
        divide_network(model.network, group)

Each block's sums go through the default group: gloo on CPUs, NCCL on GPUs. Messages have a group of their own, always
gloo, so that waiting for one keeps no GPU busy. A message is a kind and a few tensors of integers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Lock, Thread
from typing import Self, TypeVar

import torch
import torch.distributed as torch_distributed
from torch import Tensor, nn

from clearhead.costs import shard_config
from clearhead.engine import LostProcessError, MessageKind
from clearhead.errors import ClearheadError
from clearhead.model import Transformer
from clearhead.parallel.collectives import all_reduce, gather_texts, join_group, leave_group, run_everywhere
from clearhead.parallel.launch import Launch, current_launch
from clearhead.parallel.shards import TensorParallelRank, shard_network

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=10)  # a process that has not answered for so long is taken for dead
_BEAT_SECONDS = 5.0  # between messages to idle processes, so that a dead one is noticed
_HEADER = 16  # numbers: the kind of a message, the number of its tensors, and their sizes
_CPU = torch.device("cpu")
_ALTERNATIVE = "serve it in one process"
_LOST = "a process of the server has ended or does not answer any more, so all of them end; start the server again"


@dataclass
class ProcessGroup:
    """The processes that hold the shards of one network, as seen by one of them."""

    launch: Launch
    device: torch.device
    messages: torch_distributed.ProcessGroup
    _lock: Lock = field(default_factory=Lock)  # the engine and the heartbeat send in different threads
    _closing: Event = field(default_factory=Event)

    @classmethod
    def start(cls, device: str | None = None) -> Self:
        """Join the processes that torchrun has started. device: cpu, cuda, or None for CUDA where there is one."""
        launch = current_launch()
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind not in ("cpu", "cuda"):
            raise ClearheadError(f"several processes run on cpu or cuda, not on {kind}; leave out --device")
        own = torch.device(kind, launch.local_rank) if kind == "cuda" else _CPU
        if kind == "cuda" and launch.local_rank >= torch.cuda.device_count():
            message = f"there are {torch.cuda.device_count()} GPUs, but more processes; start one process per GPU"
            raise ClearheadError(message)
        join_group(own, _TIMEOUT)
        messages = torch_distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        return cls(launch, own, messages)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that answers requests and leads the others."""
        return self.launch.is_main

    def run_everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run an action in each process and return the results of all, which must be JSON values.

        If it raises a ClearheadError in one process, all processes raise it.
        """
        return run_everywhere(action, self._gather_texts)

    def _gather_texts(self, text: str) -> list[str]:
        with _lost_process():
            return gather_texts(text, _CPU, self.messages)

    # --- messages

    def send(self, kind: MessageKind, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to all other processes. Tensors (any number,) of integers."""
        sizes = [len(each) for each in tensors]
        header = torch.tensor([kind, len(sizes), *sizes, *[0] * (_HEADER - 2 - len(sizes))])
        with self._lock, _lost_process():
            torch_distributed.broadcast(header, 0, self.messages)
            if sum(sizes):
                torch_distributed.broadcast(torch.cat([each.long() for each in tensors]).cpu(), 0, self.messages)

    def receive(self) -> tuple[MessageKind, list[Tensor]]:
        """Wait for the next message."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        with _lost_process():
            torch_distributed.broadcast(header, 0, self.messages)
            kind, count, *sizes = header.tolist()
            payload = torch.empty(sum(sizes[:count]), dtype=torch.int64)
            if len(payload):
                torch_distributed.broadcast(payload, 0, self.messages)
        return MessageKind(kind), list(payload.split(sizes[:count]))

    def watch(self, on_failure: Callable[[LostProcessError], None]) -> None:
        """Send a message every few seconds, in a thread, and call `on_failure` there if a process does not answer."""

        def beat() -> None:
            while not self._closing.wait(_BEAT_SECONDS):
                try:
                    self.send(MessageKind.IDLE)
                except LostProcessError as error:
                    on_failure(error)
                    return

        Thread(target=beat, name="clearhead-heartbeat", daemon=True).start()

    def close(self) -> None:
        """Let the other processes end, and leave the group. Calling it again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self.is_main:
            try:
                self.send(MessageKind.STOP)
            except LostProcessError:
                return  # destroying a broken group waits for its dead members
        leave_group(uses_gloo=True)


@contextmanager
def _lost_process() -> Iterator[None]:
    """Turn an error of torch.distributed into LostProcessError."""
    try:
        yield
    except RuntimeError as error:
        raise LostProcessError(_LOST) from error


def divide_network(network: nn.Module, group: ProcessGroup) -> None:
    """Keep this process's heads and columns of a network, in place, and move them to its device.

    Its config becomes that of the part. Raise ClearheadError if the network cannot be divided.
    """
    if not isinstance(network, Transformer) or network.config.decoder is None or network.config.head is None:
        raise ClearheadError("several processes can only serve a Transformer that generates; serve it in one process")
    if network.config.reads_audio:
        raise ClearheadError("several processes cannot divide a model that reads audio; use one process")
    shard_network(network, TensorParallelRank(group.launch.rank, group.launch.size, _sum, _ALTERNATIVE))
    network.config = shard_config(network.config, group.launch.size)
    network.to(group.device)


def _sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place. Raise LostProcessError if one of them has ended."""
    with _lost_process():
        return all_reduce(tensor)
