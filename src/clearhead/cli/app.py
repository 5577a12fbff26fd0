"""What all commands share: the app, its entry point, the bars. Data on stdout, messages on stderr; exit code 0, 1 or 2.

    clearhead --help

Each file beside this one adds its commands to `app`; heavy imports stand inside them, so that --help answers at once.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TransferSpeedColumn

from clearhead.errors import ClearheadError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Every Transformer works, in the clear. Start with `clearhead get smollm2`.",
)
errors = Console(stderr=True, highlight=False)

ModelArgument = Annotated[str, typer.Argument(help="Installed name, folder, .gguf file or hub id.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Write over what is there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> None:
    """The entry point: a wrong input is one sentence on stderr and exit code 1. --debug may stand anywhere."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except ClearheadError as error:
        if len(arguments) < len(sys.argv) - 1:
            raise
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that may not be written
        errors.print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)


def print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(version("clearhead"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What holds for every command; `main` looks at --debug."""


def check_absent(path: Path, overwrite: bool) -> None:
    """Before long work: what stands there is written over only where that was asked for."""
    taken = any(path.iterdir()) if path.is_dir() else path.exists()
    if taken and not overwrite:
        raise ClearheadError(f"{path} exists already; give another folder, or --overwrite")


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def loading_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar over the tensors of a checkpoint, on stderr and only on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(f"loading {what}", total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)


@contextmanager
def download_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda stage, done, total: bar.update(
            task, description=f"{stage} {what}", completed=done, total=total or None
        )
