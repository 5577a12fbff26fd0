"""Several processes as torchrun would start them, and a toy run in them.

run_crew(4, "fsdp", lambda world: ...)
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
from tests.training.faults import exit_code, in_child

LENGTH = 6


def start_crew(size, action):
    """Each with the environment that torchrun would give it; all must end well.

    As under torchrun's agent the store in which they meet is another process's, but its port is opened here: one that
    is free when it is chosen may be another's when it is opened. No thread may run here while they are forked: the
    store's asks for the names of its guests, and who is forked meanwhile waits for the resolver's lock for ever.
    RES_OPTIONS: where nobody answers such a question, ask once, for a second.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, port = listening.getsockname()
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        meeting |= {"WORLD_SIZE": str(size), "RES_OPTIONS": "attempts:1 timeout:1"}

        parent = os.getpid()

        def keep_store():
            os.environ |= meeting
            store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.fileno())
            while store and os.getppid() == parent:
                time.sleep(1)

        def work(rank):
            os.environ |= meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                return action()
            except BaseException:
                traceback.print_exc()
                raise

        keeper = in_child(keep_store)
        children = [in_child(lambda rank=rank: work(rank)) for rank in range(size)]
    try:
        assert [exit_code(child) for child in children] == [0] * size
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def run_crew(size, kind, action):
    def in_world():
        with World.start(kind, "cpu") as world:
            return action(world)

    start_crew(size, in_world)


class Loss(nn.Module):
    """The way to the loss in one forward: the sum over the targets."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, *inputs):
        *read, targets = inputs
        logits = self.network(*read)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Run:
    """A network and its optimizer in a world; step `n` reads the same eight rows whatever the world is."""

    def __init__(self, world, config, dtype=torch.float64, optimizer=torch.optim.AdamW, wrapped_dtype=None, **options):
        self.world, self.network = world, Transformer(config).to(dtype)
        redraw(self.network)
        self.wrapped = world.wrap(Loss(self.network), wrapped_dtype)
        self.optimizer = optimizer(self.network.parameters(), **({"lr": 1e-2} | options))
        self.losses, self.norms = [], []

    @property
    def weights(self):
        return dict(self.network.named_parameters())

    def rows(self, step):
        """Unequal lengths: row r asks for r % LENGTH + 1 targets."""
        generator = torch.Generator().manual_seed(step)
        sides = 3 if self.network.config.is_encoder_decoder else 2
        *read, targets = torch.randint(0, VOCAB, (sides, 8, LENGTH), generator=generator)
        asked = torch.arange(LENGTH) <= torch.arange(8)[:, None] % LENGTH
        return [*read, targets.masked_fill(~asked, -100)]

    def step(self, number, num_parts=1):
        rows = [side.chunk(self.world.data_size)[self.world.data_rank] for side in self.rows(number)]
        count = self.world.sum((rows[-1] >= 0).sum())
        parts = list(zip(*(side.chunk(num_parts) for side in rows), strict=True))
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
