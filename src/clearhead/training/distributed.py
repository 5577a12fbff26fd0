"""Run one training loop in several processes. In this package, only this module knows torch.distributed.

    with World.start("fsdp") as world:                             # torchrun --nproc-per-node 4 ...
        wrapped = world.wrap(objective)                            # its forward must compute the loss
        (wrapped(batch) / world.sum(num_targets)).backward()
        world.clip_gradients(objective.parameters(), 1.0)

    ddp   every process holds all weights and reads its own rows; gradients are summed
    fsdp  every process holds a shard of each weight and gathers the weights of a block when it computes it
    tp    every process holds some heads and columns of each block (parallel/shards.py); all read the same rows

Gradients are summed over the processes, not averaged, because the loss is divided by the targets of all processes.
Without torchrun there is one process, and the strategies have no effect.
"""

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
from clearhead.parallel import (
    TensorParallelRank,
    all_reduce,
    current_launch,
    gather_texts,
    join_group,
    leave_group,
    run_everywhere,
    shard_network,
)
from clearhead.training.tensor_slice import TensorSlice

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_ALTERNATIVE = "use strategy 'fsdp'"  # for networks that tensor parallelism cannot divide

Strategy = Literal["single", "ddp", "fsdp", "tp"]


@dataclass
class World:
    """The processes that train one model together, as seen by one of them."""

    strategy: Strategy
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None  # None: a single process
    sharded_axes: dict[Tensor, int] = field(default_factory=dict)  # tensor parallel: axis of each sharded weight

    @classmethod
    def start(cls, strategy: Strategy = "ddp", device: str | torch.device = "auto") -> "World":
        """Join the processes that torchrun started. `device` "auto" is this process's CUDA device if there is one."""
        launch = current_launch()
        own_device = _local_device(device, launch.local_rank)
        if launch.size == 1:
            return cls(strategy, 0, 1, own_device)
        if strategy == "single":
            raise ClearheadError(
                f"the strategy is 'single', but torchrun started {launch.size} processes; use ddp, fsdp or tp"
            )
        join_group(own_device)
        return cls(strategy, launch.rank, launch.size, own_device, init_device_mesh(own_device.type, (launch.size,)))

    @classmethod
    def single_process(cls) -> "World":
        """Return the world of one process on the CPU. Raise ClearheadError under torchrun with several processes."""
        return cls.start("single", "cpu")

    def close(self) -> None:
        """Leave the process group."""
        if self.mesh is not None:
            leave_group(uses_gloo=self.device.type == "cpu")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes shared files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Index of the part of every batch that this process reads, of `num_data_ranks` parts."""
        return 0 if self.strategy == "tp" else self.rank

    @property
    def num_data_ranks(self) -> int:
        """Number of processes that read different rows."""
        return 1 if self.strategy == "tp" else self.size

    # --- the network

    def wrap(self, network: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the module to call. All processes must hold the same weights before.

        `dtype` is what fsdp gathers weights and computes in. Gradients are summed in float32.
        """
        if self.mesh is None:
            return network
        match self.strategy:
            case "ddp":
                wrapped = DistributedDataParallel(network)
                wrapped.register_comm_hook(None, _sum_bucket)
                return wrapped
            case "fsdp":
                return _fully_shard_network(network, self.mesh, dtype)
            case _:
                rank = TensorParallelRank(self.rank, self.size, all_reduce, _ALTERNATIVE)
                self.sharded_axes = shard_network(network, rank)
                return network

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients locally. Use it for every backward pass of a step except the last, which sums them."""
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        return _without_gradient_sync(wrapped) if isinstance(wrapped, FSDPModule) else nullcontext()

    @torch.no_grad()
    def clip_gradients(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Return the norm of all gradients as one vector, and scale them down to `max_norm` unless it is 0."""
        sharded: list[Tensor] = []
        replicated: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                gradients = sharded if self.is_sharded(parameter) else replicated
                gradients.append(to_local(parameter.grad))
        norm, sharded_norm = (torch.nn.utils.get_total_norm(part).to(self.device) for part in (replicated, sharded))
        if self.mesh is not None:
            norm = (norm.square() + all_reduce(sharded_norm.square())).sqrt()
        if max_norm > 0:
            scale = (max_norm / (norm + EPSILON)).clamp(max=1.0)
            for gradients in filter(None, (sharded, replicated)):
                torch._foreach_mul_(gradients, scale)
        return norm

    # --- collective operations: all processes must call them

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the processes that read different rows."""
        return tensor if self.num_data_ranks == 1 else all_reduce(tensor.clone())

    def any(self, flag: bool) -> bool:
        """Return in all processes whether the flag is set in at least one of them."""
        return flag if self.mesh is None else bool(all_reduce(torch.tensor(float(flag), device=self.device)) > 0)

    def run_everywhere(self, action: Callable[[], Any]) -> list[Any]:
        """Run an action in each process and return all results, which must be JSON values.

        If the action raises a ClearheadError in one process, all processes raise it.
        """
        if self.mesh is None:
            return [action()]
        return run_everywhere(action, lambda text: gather_texts(text, self.device))

    @torch.no_grad()
    def gather_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all weights in full on the CPU of the main process, and nothing in the others."""
        gathered = {}
        for name, weight in weights.items():
            full = self.full_tensor(weight)
            if self.is_main:
                gathered[name] = full.detach().cpu()
        return gathered

    def full_tensor(self, weight: Tensor) -> Tensor:
        """Return a weight in full from the shards of all processes."""
        if isinstance(weight, DTensor):
            return weight.full_tensor()
        if weight not in self.sharded_axes:
            return weight
        parts = [torch.empty_like(weight) for _ in range(self.size)]
        torch_distributed.all_gather(parts, weight.contiguous())
        return torch.cat(parts, dim=self.sharded_axes[weight])

    # --- the part of a tensor that this process holds

    def is_sharded(self, tensor: Tensor) -> bool:
        """Return whether this process holds only a part of a weight."""
        return tensor in self.sharded_axes or (isinstance(tensor, DTensor) and tensor.placements[0].is_shard())

    def slice_of(self, tensor: Tensor, weight: Tensor | None = None) -> TensorSlice:
        """Return which part of a tensor this process holds.

        `weight` is the weight that an optimizer's tensor belongs to; a tensor of its shape is sharded like it.
        """
        axis = self.sharded_axes.get(tensor if weight is None or weight.shape != tensor.shape else weight)
        if axis is not None:
            length = tensor.shape[axis]
            return TensorSlice.along(axis, tensor.shape, self.rank * length, length, self.size * length)
        if self.is_sharded(tensor):
            assert isinstance(tensor, DTensor)
            axis = cast(Shard, tensor.placements[0]).dim
            step = -(-tensor.shape[axis] // self.size)  # torch.chunk divides in the same way
            start = min(self.rank * step, tensor.shape[axis])
            return TensorSlice.along(axis, tensor.shape, start, to_local(tensor).shape[axis], tensor.shape[axis])
        return TensorSlice.full(tensor.shape)

    def shard_like(self, piece: Tensor, weight: Tensor) -> Tensor:
        """Return this process's piece of a tensor in the form in which it holds the weight."""
        if not isinstance(weight, DTensor):
            return piece
        mesh, shape = weight.device_mesh, weight.shape
        return DTensor.from_local(
            piece.to(weight.device), mesh, weight.placements, run_check=False, shape=shape, stride=weight.stride()
        )


def is_main_process() -> bool:
    """Return whether this is torchrun's first process or the only one. It needs no World."""
    return current_launch().is_main


def _local_device(device: str | torch.device, local_rank: int) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = resolve_device(f"cuda:{local_rank}" if str(device) == "cuda" else device)
    assert resolved is not None
    return resolved


def _fully_shard_network(network: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> nn.Module:
    """Apply FSDP2 to each block, and to the rest of the network (embeddings, last norm, head) as one unit."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    precise = MixedPrecisionPolicy(cast_forward_inputs=False)  # routers decide between close scores
    for module in reversed(list(network.modules())):  # inner modules before outer ones
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        elif isinstance(module, RouterLayer) and dtype is not None:
            fully_shard(module, mesh=mesh, mp_policy=precise)
    # By default the outermost module keeps its weights until its backward pass, which validation does not run.
    fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the only reduction that gloo has
    return network


@contextmanager
def _without_gradient_sync(wrapped: FSDPModule) -> Iterator[None]:
    wrapped.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapped.set_requires_gradient_sync(True)


def _sum_bucket(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum gradients in DDP, whose default hook divides by the number of processes."""
    work = torch_distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def to_local(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this process holds; any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
