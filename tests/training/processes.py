"""Run several processes as torchrun would start them, and train a small network in them.

run_distributed(4, "fsdp", lambda world: ...)
"""

import os
import signal
import socket
import time
import traceback

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.nn import functional

from clearhead.model.transformer import Transformer
from clearhead.training.distributed import World
from tests.model.toys import VOCAB, redraw
from tests.training.faulty_disk import exit_code, fork_child

LENGTH = 6


def run_in_processes(size, action):
    """Run an action in `size` processes with the environment of torchrun. All of them must succeed.

    As with torchrun's agent, the store through which the processes find each other belongs to another process. Its port
    is opened here, because a free port could be taken between choosing and opening it. The store itself is not created
    here, because its thread resolves host names, and a process that is forked meanwhile would wait forever for the
    resolver's lock. RES_OPTIONS limits name resolution to one attempt of one second.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, port = listening.getsockname()
        environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= {"WORLD_SIZE": str(size), "RES_OPTIONS": "attempts:1 timeout:1"}

        parent = os.getpid()

        def serve_store():
            os.environ |= environment
            store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.fileno())
            while store and os.getppid() == parent:
                time.sleep(1)

        def work(rank):
            os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                return action()
            except BaseException:
                traceback.print_exc()
                raise

        store_process = fork_child(serve_store)
        children = [fork_child(lambda rank=rank: work(rank)) for rank in range(size)]
    try:
        assert [exit_code(child) for child in children] == [0] * size
    finally:
        os.kill(store_process, signal.SIGKILL)
        os.waitpid(store_process, 0)


def run_distributed(size, strategy, action):
    """Run an action with a World of `size` processes."""

    def with_world():
        with World.start(strategy, "cpu") as world:
            return action(world)

    run_in_processes(size, with_world)


class SummedLoss(nn.Module):
    """A network and its cross-entropy, summed over the targets, in one forward pass."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, *inputs_and_targets):
        *inputs, targets = inputs_and_targets
        logits = self.network(*inputs)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class SmallRun:
    """A network and its optimizer in a world. Step n reads the same eight rows in every world."""

    def __init__(self, world, config, dtype=torch.float64, optimizer=torch.optim.AdamW, wrapped_dtype=None, **options):
        self.world, self.network = world, Transformer(config).to(dtype)
        redraw(self.network)
        self.wrapped = world.wrap(SummedLoss(self.network), wrapped_dtype)
        self.optimizer = optimizer(self.network.parameters(), **({"lr": 1e-2} | options))
        self.losses, self.norms = [], []

    @property
    def weights(self):
        return dict(self.network.named_parameters())

    def rows(self, step):
        """Return the inputs and targets of a step. Row r has r % LENGTH + 1 targets."""
        generator = torch.Generator().manual_seed(step)
        num_tensors = 3 if self.network.config.is_encoder_decoder else 2
        *inputs, targets = torch.randint(0, VOCAB, (num_tensors, 8, LENGTH), generator=generator)
        has_target = torch.arange(LENGTH) <= torch.arange(8)[:, None] % LENGTH
        return [*inputs, targets.masked_fill(~has_target, -100)]

    def step(self, number, num_parts=1):
        rows = [tensor.chunk(self.world.num_data_ranks)[self.world.data_rank] for tensor in self.rows(number)]
        count = self.world.sum((rows[-1] >= 0).sum())
        parts = list(zip(*(tensor.chunk(num_parts) for tensor in rows), strict=True))
        loss = torch.zeros((), dtype=torch.float64)
        for part in parts[:-1]:
            with self.world.no_sync(self.wrapped):
                loss += self.backward(part, count)
        loss += self.backward(parts[-1], count)
        self.norms.append(self.world.clip_gradients(self.network.parameters(), 1.0).item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(self.world.sum(loss).item())

    def backward(self, part, count):
        loss = self.wrapped(*part) / count
        loss.backward()
        return loss.detach()
