"""What all commands share: the app, its entry point, the bars. Data on stdout, messages on stderr; exit code 0, 1 or 2.

    clearhead --help

Each file beside this one adds its commands to `app`; heavy imports stand inside them, so that --help answers at once.
"""

import io
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)

from clearhead.errors import ClearheadError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Every Transformer works, in the clear. Start with `clearhead get smollm2`.",
)
errors = Console(stderr=True, highlight=False, emoji=False)
PIPE_WIDTH = 120  # characters
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]  # it has no public name in typer

ModelArgument = Annotated[str, typer.Argument(help="Installed name, folder, .gguf file or hub id.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Write over what is there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> None:
    """The entry point: a wrong input is one sentence on stderr. --debug may stand anywhere.

    Exit code 1, or 2 where the command itself could not be understood.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal's encoding lacks is spelled out
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text are refused where the text is encoded
        sys.stdin.reconfigure(errors="surrogateescape")
    warnings.formatwarning = lambda message, *place, **line: f"note: {message}\n"
    try:
        sys.exit(app(arguments, prog_name="clearhead", standalone_mode=False))
    except UsageError as error:
        if said := error.format_message():  # none where the help was asked for, and is printed by now
            where = error.ctx.command_path if error.ctx else "clearhead"
            tell("error", f"{said[0].lower()}{said[1:].rstrip('.')} (see {where} --help)")
        sys.exit(2)
    except (ClearheadError, OSError) as error:  # OSError: a full disk, a folder that may not be written
        if len(arguments) < len(sys.argv) - 1:
            raise
        tell("error", as_typed(str(error), arguments))
        sys.exit(1)
    except typer.Abort:  # nobody at the other end of a question
        sys.exit(1)


def open_streams() -> None:
    """Whoever started this may have closed some (`<&-`): nothing comes in then, and what goes out is dropped."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (until the end)


def tell(kind: str, said: str) -> None:
    """One line on stderr: an error or a note."""
    errors.print(f"{kind}: {said}", markup=False, soft_wrap=True)


def as_typed(said: str, arguments: list[str]) -> str:
    """With the options of the command as they are typed: top_p becomes --top-p, temperature 1 --temperature 1."""
    command: Any = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    for parameter in command.params:
        ending = r"\b" if "_" in parameter.name else r"(?= -?\d)"  # a plain word is an option before a value only
        said = re.sub(rf"(?<!-)\b{parameter.name}{ending}", parameter.opts[0], said)
    return said


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


def check_absent(path: Path, overwrite: bool, kind: str = "folder") -> None:
    """Before long work: what stands there is written over only where that was asked for."""
    taken = any(path.iterdir()) if path.is_dir() else path.exists()
    if taken and not overwrite:
        raise ClearheadError(f"{path} exists already; give another {kind}, or --overwrite")


def print_json(data: Any) -> None:
    typer.echo(json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def finite(data: Any) -> Any:
    """With null for what is no number or infinite: JSON has neither."""
    match data:
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: finite(value) for name, value in data.items()}
        case list() | tuple():
            return [finite(value) for value in data]
    return data


def table_console() -> Console:
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:  # there rich takes 80 characters, and would fold the rows
        console.width = max(console.width, PIPE_WIDTH)
    return console


def progress_bar(*columns: ProgressColumn) -> Progress:
    """On stderr and only on a terminal."""
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    return Progress(*shown, console=errors, transient=True, disable=not errors.is_terminal)


@contextmanager
def loading_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """Over the tensors of a checkpoint."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(f"loading {what}", total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)


@contextmanager
def download_bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    with progress_bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda stage, done, total: bar.update(
            task, description=f"{stage} {what}", completed=done, total=total or None
        )
