"""A model whose engine computes nothing: each step keeps the interpreter's lock for a time and then waits without it.

    model = IdleModel(network, tokenizer, locked_seconds=0.001, waiting_seconds=0.0015)

To the server it looks like a model on a GPU, so that everything around the engine can be measured without one. The
engine's own bookkeeping, about 4 us for a token, is real and comes on top of both times.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from clearhead import Model
from clearhead.engine import Engine
from clearhead.engine.executor import Done
from clearhead.engine.sampler import Choice
from clearhead.engine.scheduler import ScheduledTokens
from clearhead.engine.sequence import EngineSequence

_TOKEN = 7


@dataclass(frozen=True)
class IdleModel(Model):
    """A model that generates the same token again and again, in steps of a set time."""

    locked_seconds: float = 0.001
    waiting_seconds: float = 0.0015

    @property
    def device(self) -> torch.device:
        """Where the model says that it is. On a CPU, the server would let the engine wait for it."""
        return torch.device("cuda")

    def engine(self, **settings: Any) -> Engine:
        """Return an engine that computes nothing."""
        engine = super().engine(**settings)
        engine.executor = IdleExecutor(self.locked_seconds, self.waiting_seconds)
        return engine


@dataclass(frozen=True)
class IdleExecutor:
    """Chooses tokens without computing anything."""

    locked_seconds: float
    waiting_seconds: float
    is_asynchronous: bool = False
    max_length: int | None = None

    def copy_pages(self, copies: Sequence[object]) -> None:
        """Do nothing."""

    def release(self, sequence: EngineSequence) -> None:
        """Do nothing."""

    def start(self, items: Sequence[ScheduledTokens]) -> Done:
        """Take the time of a step."""
        end = time.thread_time() + self.locked_seconds
        while time.thread_time() < end:  # keeps the lock, as launching kernels from Python does
            pass
        time.sleep(self.waiting_seconds)  # gives it away, as waiting for a GPU does
        return Done([(item.sequence, Choice(_TOKEN, None)) for item in items if item.is_sampled])
