"""Let a training run say in shared memory which phase it is in, so that another process can kill it there.

board = PhaseBoard(); with announced_phases(board): train(...)     # board.phase, board.count("save")
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from clearhead.training import loop
from clearhead.training.learner import Learner

PHASES = ("start", "fork", "resume", "step", "validate", "save", "finish", "end")


class PhaseBoard:
    """Memory shared with a run, in which it writes its phase: the current one, and how often each one was entered."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096)

    def enter(self, phase: str) -> str:
        """Write the phase, and return the one before."""
        before, number = PHASES[self.memory[0]], PHASES.index(phase)
        self.memory[0] = number
        self._write_count(number, self.count(phase) + 1)
        return before

    def leave(self, before: str) -> None:
        """Return to an earlier phase."""
        self.memory[0] = PHASES.index(before)

    @property
    def phase(self) -> str:
        return PHASES[self.memory[0]]

    def count(self, phase: str) -> int:
        """Return how often a phase was entered."""
        return int(struct.unpack_from("<I", self.memory, 8 + 4 * PHASES.index(phase))[0])

    def clear(self) -> None:
        self.memory[:] = bytes(len(self.memory))

    def _write_count(self, number: int, count: int) -> None:
        struct.pack_into("<I", self.memory, 8 + 4 * number, count)


def marked(board: PhaseBoard, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that writes its phase while it runs."""

    def run(*arguments: Any, **options: Any) -> Any:
        before = board.enter(phase)
        try:
            return function(*arguments, **options)
        finally:
            board.leave(before)

    return run


@contextmanager
def announced_phases(board: PhaseBoard) -> Iterator[None]:
    """Make the training loop of this process write its phases to the board."""
    places = [
        (loop, "start_run", "start"),
        (loop, "validate", "validate"),
        (loop, "accumulate_gradients", "step"),
        (loop, "finish_run", "finish"),
        (Learner, "save", "save"),
        (Learner, "restore", "resume"),
        (DataLoader, "_get_iterator", "fork"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, phase), original in zip(places, originals, strict=True):
        setattr(owner, name, marked(board, phase, original))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
        board.enter("end")
