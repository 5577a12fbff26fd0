"""Report a run: print progress, write metrics.jsonl, and measure the throughput.

with Reporter(console, folder, learner, 0, to_dict(recipe)) as reporter: reporter.log_validation(10, validation.metrics)
"""

import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from clearhead.training.display import Display
from clearhead.training.learner import Learner
from clearhead.training.metrics import MetricsLog, ThroughputMeter
from clearhead.training.trackers import open_tracker


class Reporter:
    """The display, the metrics log and the throughput meter of a run. Only the main process prints and writes."""

    def __init__(self, console: Console, folder: Path, learner: Learner, first_step: int, recipe: dict[str, Any]):
        is_main, self._learner, config = learner.world.is_main, learner, learner.config
        self._meter = ThroughputMeter(learner.network, learner.world.device)
        self._log = None
        if is_main:
            tracker = open_tracker(config.tracker, folder, config.project, recipe, first_step)
            self._log = MetricsLog(folder, first_step, tracker)
        self._display = Display(console, config.steps, first_step, silent=not is_main)
        self._validation_started, self._validation_seconds = 0.0, 0.0

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.__exit__(*error)
        if self._log is not None:
            self._log.close()

    def print(self, message: str) -> None:
        """Print a line."""
        self._display.print(message)

    def log_step(self, step: int, loss: float, gradient_norm: float, num_targets: int, length: int) -> None:
        """Count a step and, every `log_every` steps and at the last one, log its metrics.

        `step` is the number of completed steps, `length` the number of tokens in a row.
        """
        config = self._learner.config
        self._meter.count_step(num_targets)
        self._display.show_step(step)
        if config.is_due(step, config.log_every):
            row = {"step": step, "loss": loss, "learning_rate": self._learner.learning_rate}
            row |= {"gradient_norm": gradient_norm} | self._meter.read(length, num_steps_left=config.steps - step)
            row["seconds_left"] += self._validation_seconds * _count_due(step, config.steps, config.validate_every)
            self._write(row)

    def show_validation(self, num_batches: int, total: int) -> None:
        """Show the progress of a validation, from its first batch to its last."""
        self._display.show_validation(num_batches, total)
        if num_batches == 0:
            self._validation_started = time.perf_counter()
        self._validation_seconds = time.perf_counter() - self._validation_started

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Log a validation. Its time does not count towards the throughput."""
        self._write({"step": step, **metrics})
        self.restart_meter()

    def restart_meter(self) -> None:
        """Measure the throughput from now on, for example after a save."""
        self._meter.restart()

    def _write(self, row: dict[str, Any]) -> None:
        self._display.show_metrics(row)
        if self._log is not None:
            self._log.write(row)


def _count_due(step: int, num_steps: int, every: int) -> int:
    """Return how often work of every `every` steps and of the last step is still due, from `step` on."""
    return num_steps // every - (step - 1) // every + (num_steps % every > 0)
