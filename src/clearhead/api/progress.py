"""A progress bar over the texts of one call.

with finished_texts_bar(show=True) as on_finish: on_finish(3, 10)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clearhead.terminal import TerminalConsole


@contextmanager
def finished_texts_bar(show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on the standard error stream, and yield the function that sets how many of all texts are finished.

    Yield None if no bar is to be shown.
    """
    if not show:
        yield None
        return
    columns = TextColumn("generating", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=TerminalConsole(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda finished, total: bar.update(task, completed=finished, total=total)
