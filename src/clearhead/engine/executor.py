"""Executors run the tokens of a schedule and choose the next token of each sequence that has been read to its end.

    pending = executor.start(schedule.items); choices = pending.result()

ModuleExecutor runs the network's modules, or the CPU kernels in their place, and has the result at once. The executor
of graph_executor.py only starts the work on a GPU, so that the engine can schedule the next step meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from clearhead.cache import PageCopy, PageTable
from clearhead.engine.batch import PackedBatch
from clearhead.engine.prompt_scores import score_prompts
from clearhead.engine.runner import Runner
from clearhead.engine.sampler import Choices, Sampler
from clearhead.engine.scheduler import ScheduledTokens
from clearhead.engine.sequence import EngineSequence


class Pending(Protocol):
    """A step that has been started."""

    def result(self) -> Choices:
        """Wait for the step and return the next token, or tokens, of every sequence that it read to the end."""


class Executor(Protocol):
    """What the engine needs of an executor."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether `start` returns before the tokens are known."""

    @property
    def max_length(self) -> int | None:
        """Number of tokens of the longest sequence and of the longest source; None: as many as there are pages."""

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages before they are written to (`PageCopy`)."""

    def start(self, items: Sequence[ScheduledTokens]) -> Pending:
        """Run scheduled tokens and choose the next token of each sequence that is then read to its end."""

    def release(self, sequence: EngineSequence) -> None:
        """Forget a sequence that has finished or was preempted."""


@dataclass(frozen=True)
class Done:
    """The result of a step that has been computed already."""

    choices: Choices

    def result(self) -> Choices:
        """Return the next tokens."""
        return self.choices


@dataclass(frozen=True)
class ModuleExecutor:
    """Run steps in the network's modules, or in the CPU kernels that replace them."""

    runner: Runner
    sampler: Sampler
    is_asynchronous: bool = False
    max_length: int | None = None

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages before they are written to (`PageCopy`)."""
        self.runner.copy_pages(copies)

    def start(self, items: Sequence[ScheduledTokens]) -> Done:
        """Run scheduled tokens and choose the next token of each sequence that is then read to its end."""
        encode_sources(items, self.runner.encode)
        batch = PackedBatch.from_schedule(items, self.runner.network.device)
        hidden = self.runner.run(batch)
        score_prompts(items, hidden, self.runner.logits)
        if not batch.sampled:
            return Done([])
        logits = self.runner.logits(hidden[batch.sampled_rows])
        return Done(self.sampler.choose(batch.sampled, logits))

    def release(self, sequence: EngineSequence) -> None:
        """Do nothing: all that is kept of a sequence is in its page tables."""


def encode_sources(
    items: Sequence[ScheduledTokens], encode: Callable[[Sequence[Sequence[int]], Sequence[PageTable]], None]
) -> None:
    """Run the encoder for the sources of scheduled sequences that have just been admitted."""
    sequences = [item.sequence for item in items if item.sequence.needs_encoding]
    if not sequences:
        return
    tables = [sequence.source_table for sequence in sequences if sequence.source_table is not None]
    encode([sequence.request.source for sequence in sequences], tables)
    for sequence in sequences:
        sequence.needs_encoding = False
