"""A study: a claim of the book, an experiment that tests it with several seeds, and what came out.

    result = run_study(load_study("mask"), first_seed=0, smoke=True); print(result.verdict)

Every study is one module of this package with a constant STUDY. It builds small networks with the public API, and its
`measure` returns plain numbers for one seed; everything else is computed from the numbers of all seeds.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from clearhead.errors import unknown_name
from clearhead.studies.catalog import ENTRIES, Entry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SEEDS = 3
Item = TypeVar("Item")
Measurements = dict[str, Any]  # what one seed gave: numbers, and lists and dicts of numbers
Progress = Callable[[str, int, int], None]  # the step that begins, finished steps, all steps


def _no_progress(step: str, done: int, total: int) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Run:
    """One execution of a study with one seed."""

    seed: int
    smoke: bool = False  # very small sizes, to check that the study works; the numbers mean nothing
    progress: Progress = _no_progress

    def size(self, full: int, smoke: int) -> int:
        """Return a size of the experiment: the full one, or the one for a smoke run."""
        return smoke if self.smoke else full

    def each(self, items: Iterable[Item], name: Callable[[Item], str] = str) -> Iterator[Item]:
        """Yield the items of the main loop of a study, and report each as the step that begins."""
        listed = list(items)
        for number, item in enumerate(listed):
            self.progress(name(item), number, len(listed))
            yield item


@dataclass(frozen=True)
class Table:
    """The result of a study as text: one row for each thing that was compared."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A claim, the experiment that tests it, and how its numbers are shown."""

    entry: Entry
    claim: str  # what the book says
    setup: str  # what is built and measured
    explanation: str  # why it comes out like this
    limits: str  # what the study does not show
    measure: Callable[[Run], Measurements]
    holds: Callable[[Measurements], bool]  # whether one seed confirms what `conclude` says
    conclude: Callable[[Sequence[Measurements]], str]  # the result of all seeds in one sentence
    tabulate: Callable[[Sequence[Measurements]], Table]
    draw: "Callable[[Figure, Sequence[Measurements]], None]"
    figure_size: tuple[float, float] = (10.0, 4.2)  # inches

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.entry.name


@dataclass(frozen=True)
class StudyResult:
    """What a study found with all of its seeds."""

    study: Study
    seeds: tuple[int, ...]
    smoke: bool
    measurements: list[Measurements] = field(repr=False)
    seconds: float

    @property
    def holds(self) -> list[bool]:
        """Whether each seed confirms the conclusion."""
        return [self.study.holds(numbers) for numbers in self.measurements]

    @property
    def verdict(self) -> str:
        """The conclusion in one line, with the number of seeds that confirm it."""
        if self.smoke:
            return f"{self.study.name}: smoke run, too small to conclude anything; it ran without an error"
        conclusion = self.study.conclude(self.measurements)
        return f"{self.study.name}: {conclusion} ({sum(self.holds)} of {len(self.seeds)} seeds agree)"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        table = self.study.tabulate(self.measurements)
        return {
            "study": self.study.name,
            "title": self.study.entry.title,
            "statements": list(self.study.entry.statements),
            "verdict": self.verdict,
            "seeds": list(self.seeds),
            "holds": self.holds,
            "smoke": self.smoke,
            "seconds": round(self.seconds, 1),
            "table": {"headings": list(table.headings), "rows": [list(row) for row in table.rows]},
            "measurements": self.measurements,
        }


def load_study(name: str) -> Study:
    """Return the study of this name; raise ClearheadError if there is none. A wrong name does not import torch."""
    if name not in ENTRIES:
        raise unknown_name("study", name, ENTRIES, "`clearhead study` lists all studies")
    study: Study = import_module(f"clearhead.studies.{name}").STUDY
    return study


def run_study(
    study: Study, *, first_seed: int = 0, smoke: bool = False, progress: Progress = _no_progress
) -> StudyResult:
    """Run a study with consecutive seeds, three of them or one for a smoke run, and return what it found."""
    seeds = tuple(range(first_seed, first_seed + (1 if smoke else NUM_SEEDS)))
    start = time.perf_counter()
    measurements = []
    for number, seed in enumerate(seeds):

        def report(step: str, done: int, total: int, number: int = number) -> None:
            progress(f"{study.name}: {step}", number * total + done, len(seeds) * total)

        measurements.append(study.measure(Run(seed, smoke, report)))
    return StudyResult(study, seeds, smoke, measurements, time.perf_counter() - start)
