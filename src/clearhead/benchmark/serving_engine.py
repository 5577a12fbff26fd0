"""The interface of engines that answer many requests at once, which `clearhead bench serve` measures.

    engine.open(concurrency=8, capacity=128)
    engine.send(0, prompt_ids, num_tokens=64); finished = engine.wait()
    times = engine.take_token_times(); engine.close()

All tokens are greedy, and no engine stops early: end tokens are treated like any other token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar


class ServingEngine(ABC):
    """An engine with one model in one weight format. Creating it checks that it can run; `open` loads the weights."""

    name: ClassVar[str]
    weights: str  # one of WEIGHTS
    note: str | None = None  # what a reader of its numbers should know; known after `open`

    @abstractmethod
    def open(self, concurrency: int, capacity: int) -> None:
        """Prepare for this many requests at the same time, each with at most `capacity` tokens.

        Nothing of earlier requests is kept. Raise ClearheadError if the engine cannot run the model.
        """

    @abstractmethod
    def send(self, number: int, prompt: Sequence[int], num_tokens: int) -> None:
        """Send a request without waiting for it; `number` names it in `wait`."""

    @abstractmethod
    def wait(self) -> list[int]:
        """Wait for new tokens; return the requests that have got all of theirs. The list may be empty."""

    @abstractmethod
    def take_token_times(self) -> dict[int, list[float]]:
        """Return when each token of each finished request arrived (time.perf_counter), and forget these requests."""

    @abstractmethod
    def close(self) -> None:
        """Release the weights and end all processes and threads; `open` starts again. Closing twice does nothing."""

    def __str__(self) -> str:
        return f"{self.name} {self.weights}"
