"""Show the progress of a run: a live progress bar on a terminal, plain lines elsewhere.

with Display(console, num_steps=5000, first_step=0) as display: display.show_metrics({"step": 10, "loss": 2.5})
"""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Display:
    """The console output of a run. A silent one prints nothing."""

    def __init__(self, console: Console, num_steps: int, first_step: int, silent: bool = False):
        self.console, self.num_steps, self.silent = console, num_steps, silent
        columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
        self.bar = Progress(*columns, console=console, disable=silent or not console.is_terminal)
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)
        self.validation_task = self.bar.add_task("batches of the validation", total=None, visible=False)
        self.validation_loss: float | None = None

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show_step(self, step: int) -> None:
        """Move the bar; the numbers next to it change only when they are logged."""
        self.bar.update(self.task, completed=step)

    def show_validation(self, num_batches: int, total: int) -> None:
        """Show a second bar while a validation runs."""
        self.bar.update(self.validation_task, completed=num_batches, total=total, visible=num_batches < total)

    def show_metrics(self, row: Mapping[str, float]) -> None:
        """Show a row of metrics.jsonl."""
        if self.silent:
            return
        self.validation_loss = row.get("validation_loss", self.validation_loss)
        if self.console.is_terminal:
            validation = {} if self.validation_loss is None else {"validation_loss": self.validation_loss}
            self.bar.update(self.task, completed=row["step"], description=format_metrics({**row, **validation}))
        else:
            self.print(f"step {row['step']}/{self.num_steps}  {format_metrics(row)}")

    def print(self, message: str) -> None:
        """Print a line above the progress bar."""
        if not self.silent:
            self.console.print(message, markup=False, soft_wrap=True)


FORMATS = {
    "loss": "loss {:.4f}",
    "validation_loss": "validation {:.4f}",
    "margin": "margin {:.3f}",
    "accuracy": "accuracy {:.1%}",
    "learning_rate": "rate {:.2e}",
    "gradient_norm": "gradient {:.2f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%} (6P+12LDT)",
}


def format_metrics(row: Mapping[str, float]) -> str:
    """Return a row of metrics as one line of text."""
    words = [template.format(row[name]) for name, template in FORMATS.items() if name in row]
    if "memory_bytes" in row:
        words.append(f"{row['memory_bytes'] / 1e9:.1f} GB")
    if "seconds_left" in row:
        words.append(f"{format_duration(row['seconds_left'])} left")
    return "  ".join(words)


def format_duration(seconds: float) -> str:
    """Return a duration as 1:05, or as 2:01:05 from an hour on."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
