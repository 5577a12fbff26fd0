"""Several processes as one: the only file that knows of ranks, torchrun and torch.distributed.

    with World.start("fsdp") as world:                             # torchrun --nproc-per-node 4 ...
        wrapped = world.wrap(objective)                            # its forward goes all the way to the loss
        (wrapped(batch) / world.sum(num_targets)).backward()
        world.clip_gradients(objective.parameters(), 1.0)

    ddp   each process holds all weights and reads its own rows; gradients are summed
    fsdp  each process holds a slice of every weight, and gathers a block's when it computes it
    tp    each process holds some heads and columns of every block (tensor_parallel.py); all read the same rows

Gradients are summed over the processes, not averaged: the loss is divided by what all of them count together.
Without torchrun there is one process, and every strategy does nothing.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as torch_distributed
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from clearhead.api import resolve_device
from clearhead.errors import ClearheadError
from clearhead.model import Block, RouterLayer
from clearhead.training.tensor_parallel import Part, divide

EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it

Strategy = Literal["single", "ddp", "fsdp", "tp"]


@dataclass(frozen=True)
class Box:
    """Which part of a tensor this process holds."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass
class World:
    strategy: Strategy
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None  # None: one process
    divided: dict[Tensor, int] = field(default_factory=dict)  # tensor parallel: along which axis

    @classmethod
    def start(cls, strategy: Strategy = "ddp", device: str | torch.device = "auto") -> "World":
        """Reads what torchrun puts in the environment. `device` auto: this process's CUDA device where there is one."""
        rank, size, local = (int(os.environ.get(name, default)) for name, default in TORCHRUN)
        here = local_device(device, local)
        if size == 1:
            return cls(strategy, 0, 1, here)
        if strategy == "single":
            raise ClearheadError(
                f"the strategy is 'single', but torchrun started {size} processes; use ddp, fsdp or tp"
            )
        if here.type == "cuda":
            torch.cuda.set_device(here)
            torch_distributed.init_process_group("nccl", device_id=here)
        else:
            torch_distributed.init_process_group("gloo")
        return cls(strategy, rank, size, here, init_device_mesh(here.type, (size,)))

    @classmethod
    def alone(cls) -> "World":
        """One process on the CPU; under torchrun an error, since each would take itself for the only one."""
        return cls.start("single", "cpu")

    def close(self) -> None:
        if self.mesh is None:
            return
        if self.device.type == "cpu":
            # To let go of the last tensors sent gloo's thread needs the interpreter's lock, which the group's end holds
            # while it waits for that thread (torch 2.13): a hang, unless the thread comes first.
            time.sleep(0.2)
        torch_distributed.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` parts of every batch this process reads."""
        return 0 if self.strategy == "tp" else self.rank

    @property
    def data_size(self) -> int:
        return 1 if self.strategy == "tp" else self.size

    # --- the network

    def wrap(self, network: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """The module to call. `dtype`: what fsdp gathers and computes in; gradients are summed in float32 anyway.

        All processes must hold the same weights before.
        """
        if self.mesh is None:
            return network
        match self.strategy:
            case "ddp":
                wrapped = DistributedDataParallel(network)
                wrapped.register_comm_hook(None, summed_bucket)
                return wrapped
            case "fsdp":
                return shard(network, self.mesh, dtype)
            case _:
                self.divided = divide(network, Part(self.rank, self.size, all_reduce))
                return network

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """For all but the last backward of an accumulation: gradients stay here, to be summed with the last."""
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        return unsynced(wrapped) if isinstance(wrapped, FSDPModule) else nullcontext()

    @torch.no_grad()
    def clip_gradients(self, parameters: Iterable[Tensor], largest_norm: float) -> Tensor:
        """The length of all gradients as one vector; where it exceeds `largest_norm`, not 0, they are scaled to it."""
        slices: list[Tensor] = []
        wholes: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                held = slices if self.is_slice(parameter) else wholes
                held.append(local(parameter.grad))
        norm, of_slices = (torch.nn.utils.get_total_norm(part).to(self.device) for part in (wholes, slices))
        if self.mesh is not None:
            norm = (norm.square() + all_reduce(of_slices.square())).sqrt()
        if largest_norm > 0:
            scale = (largest_norm / (norm + EPSILON)).clamp(max=1.0)
            for gradients in filter(None, (slices, wholes)):
                torch._foreach_mul_(gradients, scale)
        return norm

    # --- what all processes do together

    def sum(self, tensor: Tensor) -> Tensor:
        """Over the parts of a batch."""
        return tensor if self.data_size == 1 else all_reduce(tensor.clone())

    def any(self, flag: bool) -> bool:
        """Whether it is so in some process; all get the same answer."""
        return flag if self.mesh is None else bool(all_reduce(torch.tensor(float(flag), device=self.device)) > 0)

    def together(self, action: Callable[[], Any]) -> list[Any]:
        """What the action gave in each process, as JSON values; where it failed in one, all raise its sentence."""
        if self.mesh is None:
            return [action()]
        try:
            answer = {"gave": action()}
        except ClearheadError as error:
            answer = {"failed": str(error)}
        texts: list[Any] = [None] * self.size
        torch_distributed.all_gather_object(texts, json.dumps(answer))
        answers = [json.loads(text) for text in texts]
        for answer in answers:
            if "failed" in answer:
                raise ClearheadError(answer["failed"])
        return [answer["gave"] for answer in answers]

    # --- which part of a tensor is here

    def is_slice(self, tensor: Tensor) -> bool:
        return tensor in self.divided or (isinstance(tensor, DTensor) and tensor.placements[0].is_shard())

    def box(self, tensor: Tensor, like: Tensor | None = None) -> Box:
        """`like`: the weight that a tensor belongs to; what an optimizer keeps in its shape is sliced as it is."""
        axis = self.divided.get(tensor if like is None or like.shape != tensor.shape else like)
        if axis is not None:
            length = tensor.shape[axis]
            return box_along(axis, tensor.shape, self.rank * length, length, self.size * length)
        if self.is_slice(tensor):
            assert isinstance(tensor, DTensor)
            axis = cast(Shard, tensor.placements[0]).dim
            step = -(-tensor.shape[axis] // self.size)  # as torch.chunk divides
            start = min(self.rank * step, tensor.shape[axis])
            return box_along(axis, tensor.shape, start, local(tensor).shape[axis], tensor.shape[axis])
        return Box((0,) * tensor.ndim, tuple(tensor.shape), tuple(tensor.shape))

    def as_held(self, piece: Tensor, weight: Tensor) -> Tensor:
        """The box of a tensor as this process holds that weight."""
        if not isinstance(weight, DTensor):
            return piece
        mesh, shape = weight.device_mesh, weight.shape
        return DTensor.from_local(
            piece.to(weight.device), mesh, weight.placements, run_check=False, shape=shape, stride=weight.stride()
        )

    @torch.no_grad()
    def gather_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every weight whole, on the CPU of the main process; nothing in the others. All must call it."""
        gathered = {}
        for name, weight in weights.items():
            whole = self.whole(weight)
            if self.is_main:
                gathered[name] = whole.detach().cpu()
        return gathered

    def whole(self, weight: Tensor) -> Tensor:
        if isinstance(weight, DTensor):
            return weight.full_tensor()
        if weight not in self.divided:
            return weight
        parts = [torch.empty_like(weight) for _ in range(self.size)]
        torch_distributed.all_gather(parts, weight.contiguous())
        return torch.cat(parts, dim=self.divided[weight])


TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))  # its variables; without it, one process


def is_first_process() -> bool:
    """Before a world is there: the one of torchrun's processes, or the only one, that speaks."""
    return int(os.environ.get(*TORCHRUN[0])) == 0


def local_device(device: str | torch.device, local_rank: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    here = resolve_device(f"cuda:{local_rank}" if str(device) == "cuda" else device)
    assert here is not None
    return here


def shard(network: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
    """FSDP2: each block gathers its own weights; what is left (embeddings, last norm, head) belongs to the whole."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    precise = MixedPrecisionPolicy(cast_forward_inputs=False)  # routers: near ties decide
    for part in reversed(list(network.modules())):  # inner before outer
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        elif isinstance(part, RouterLayer) and dtype is not None:
            fully_shard(part, mesh=mesh, mp_policy=precise)
    # By default the outermost keeps its weights whole until it goes backward, which after a validation is never.
    fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for part in network.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return network


@contextmanager
def unsynced(wrapped: FSDPModule) -> Iterator[None]:
    wrapped.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapped.set_requires_gradient_sync(True)


def summed_bucket(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook of DDP that sums gradients; its own would divide by the number of processes."""
    work = torch_distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def all_reduce(tensor: Tensor) -> Tensor:
    """In place: the sum over all processes."""
    torch_distributed.all_reduce(tensor)
    return tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_along(axis: int, shape: tuple[int, ...], start: int, length: int, whole: int) -> Box:
    """All of a tensor of this shape but along one axis."""

    def put(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return (*sizes[:axis], number, *sizes[axis + 1 :])

    return Box(put(start, (0,) * len(shape)), put(length, shape), put(whole, shape))
