"""What all commands share: the Typer app, the entry point, progress bars and output helpers.

    clearhead --help

Data goes to stdout, messages and progress bars to stderr. The other modules of this package add their commands to
`app`; they import torch and other heavy packages inside the commands, so that `--help` answers at once.
"""

import errno
import io
import json
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from clearhead.errors import ClearheadError, join_choices
from clearhead.terminal import TerminalConsole, escape_controls, escape_in_json, is_terminal, one_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Load, run, train and look inside Transformer models. Start with `clearhead get smollm2`.",
)
errors = TerminalConsole(stderr=True)
_PIPE_WIDTH = 120  # characters
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]  # it has no public name in typer

ModelArgument = Annotated[
    str, typer.Argument(help="The name of an installed model, a folder, a .gguf file or a Hub id.", metavar="MODEL")
]
ARCHITECTURE_HELP = "A preset, the name of an installed model, a folder, a .gguf file or a Hub id."
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> None:
    """Run the command line, and report an error as one sentence on stderr.

    Exit with 0 on success, 1 on an error, and 2 if the command line could not be parsed. `--debug`, at any position,
    shows the traceback of an error instead.
    """
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper):  # the tokenizer refuses bytes that are not UTF-8
        sys.stdin.reconfigure(errors="surrogateescape")
    warnings.formatwarning = lambda message, *place, **line: f"note: {one_line(str(message))}\n"
    try:
        sys.exit(app(arguments, prog_name="clearhead", standalone_mode=False))
    except UsageError as error:
        if message := error.format_message():  # empty if the help was printed
            command = error.ctx.command_path if error.ctx else "clearhead"
            print_message("error", f"{_describe_usage(message)} (see {command} --help)")
        sys.exit(2)
    except (ClearheadError, OSError) as error:  # OSError: a full disk, a missing permission
        if len(arguments) < len(sys.argv) - 1:
            raise
        message = _describe_os_error(error) if isinstance(error, OSError) else str(error)
        print_message("error", _with_option_names(one_line(message), arguments))
        sys.exit(1)
    except typer.Abort:  # a question that nobody can answer: stdin is not a terminal
        sys.exit(1)
    finally:
        sys.excepthook = _print_traceback  # typer has set its own


def _describe_os_error(error: OSError) -> str:
    """Return what the operating system says about a file in the words of Clearhead's other messages."""
    if not error.filename or not error.strerror:
        return str(error)
    path = re.sub(r"\.[0-9a-f]{8}\.partial$", "", str(error.filename))  # of `atomic_write`
    if error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
        return f"{path} cannot be written: {error.strerror}; choose another folder or free space"
    return f"{path} cannot be used: {error.strerror}"


def _open_streams() -> None:
    """Replace closed standard streams (`clearhead ... <&-`) with the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open until exit)


def print_message(kind: str, message: str) -> None:
    """Print one line to stderr; `kind` is "error" or "note".

    Control characters and line breaks, which may come from a file, are escaped, and a very long message is cut.
    """
    errors.print(f"{kind}: {one_line(message)}", markup=False, soft_wrap=True)


def echo(text: str) -> None:
    """Print a line of data to stdout; on a terminal, control characters are escaped."""
    print(escape_controls(text) if is_terminal(sys.stdout) else text, flush=True)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, but with the texts of errors made safe for a terminal."""
    for line in "".join(traceback.format_exception(kind, error, trace)).removesuffix("\n").split("\n"):
        sys.stderr.write(f"{one_line(line)}\n")


def _describe_usage(message: str) -> str:
    """Return what typer says about a wrong command line in the words of Clearhead's other messages."""
    for pattern, words in (
        (r"No such (option|command):? ('?[^\s']+'?)\.?", r"unknown \1 \2"),
        (r" \(Possible options: (.*)\)| Did you mean (.*?)\??$", lambda found: _suggest(found[1] or found[2])),
        (r"Invalid value for '(.*?)': Input should be greater than or equal to (.*)", r"\1 must be \2 or more"),
        (r"Invalid value for '(.*?)': Input should be a valid integer.*", r"\1 must be a whole number"),
        (r"Invalid value for '(.*?)': Input should be a valid number.*", r"\1 must be a number"),
    ):
        message = re.sub(pattern, words, message)
    return f"{message[0].lower()}{message[1:].rstrip('.')}"


def _suggest(names: str) -> str:
    """Return typer's suggestions, `--a, --b`, as the end of a sentence."""
    return f"; did you mean {join_choices(re.split(', | or ', names))}?"


def _with_option_names(message: str, arguments: list[str]) -> str:
    """Return a message with options spelled as on the command line: `top_p` becomes `--top-p`.

    A parameter name that is also a plain word (temperature) is replaced only where it stands for the option. A key of a
    recipe is replaced if it was given on the command line.
    """
    command: Any = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    for parameter in command.params:
        name, option = parameter.name, parameter.opts[0]
        message = re.sub(rf"\b{name}=True\b", option, message)
        message = re.sub(rf"\b{name}=False\b", (*parameter.secondary_opts, option)[0], message)
        message = re.sub(rf"\b{name}='([^']*)'", rf"{option} \1", message)
        for place in [_ANY_PLACE] if "_" in name else _OPTION_PLACES:
            message = re.sub(place.format(name), option, message)
    return _with_recipe_keys(message, arguments)


_ANY_PLACE = r"(?<!-)\b{}\b"
_OPTION_PLACES = (  # where a plain word that is the name of an option stands for the option
    r"(?<!-)\b{}(?=(?: is)? -?\d)",
    r"^{}(?= is [\d'-]| has no effect| applies only| contains )",
    r"(?<=has no effect with ){}(?=;)",
    r"(?<=has no effect without ){}(?=;)",
    r"(?<=leave out ){}$",
)


def _with_recipe_keys(message: str, arguments: list[str]) -> str:
    """Return a message with the keys of a recipe spelled as they were given: `recipe.train.steps`, --train.steps."""
    given = {argument.partition("=")[0] for argument in arguments}
    unknown = re.fullmatch(r"unknown key in recipe\.([\w.]+): '(\w+)'; (did you mean '(\w+)')?(.*)", message)
    if unknown and f"--{unknown[1]}.{unknown[2]}" in given:
        suggestion = f"did you mean --{unknown[1]}.{unknown[4]}" if unknown[3] else ""
        return f"unknown key --{unknown[1]}.{unknown[2]}; {suggestion}{unknown[5]}"
    return re.sub(
        r"\brecipe\.([\w.]+\w)", lambda found: f"--{found[1]}" if f"--{found[1]}" in given else found[0], message
    )


def _print_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        echo(version("clearhead"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Define the options that every command shares; `main` handles --debug."""


def check_absent(path: Path, overwrite: bool, kind: str = "folder") -> None:
    """Raise ClearheadError if an output exists and may not be replaced. Call it before long work."""
    exists = any(path.iterdir()) if path.is_dir() else path.exists()
    if exists and not overwrite:
        raise ClearheadError(f"{path} already exists; choose another {kind} or add --overwrite")


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    echo(escape_in_json(json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False)))


def format_bytes(num_bytes: int) -> str:
    """Return a size as people read it: 98.4 MB."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def finite(data: Any) -> Any:
    """Return the data with null in place of NaN and infinity, which JSON does not have."""
    match data:
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: finite(value) for name, value in data.items()}
        case list() | tuple():
            return [finite(value) for value in data]
    return data


def table_console() -> TerminalConsole:
    """Return a console for tables; in a pipe it is wide enough not to fold rows."""
    console = TerminalConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:  # rich assumes 80 characters in a pipe
        console.width = max(console.width, _PIPE_WIDTH)
    return console


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a progress bar on stderr that is shown only on a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *columns)
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


@contextmanager
def loading_bar(model: str, action: str = "loading") -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar while tensors load; yields the callback that `clearhead.load(progress=...)` takes."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task(f"{action} {model}", total=None)
        yield lambda name, done, total: bar.update(task, completed=done, total=total)


@contextmanager
def download_bar(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar while a package downloads; yields the callback that `clearhead.get(progress=...)` takes."""
    with progress_bar(DownloadColumn(), TransferSpeedColumn()) as bar:
        task = bar.add_task(name, total=None)
        yield lambda stage, done, total: bar.update(
            task, description=f"{stage} {name}", completed=done, total=total or None
        )


@dataclass
class StepProgress:
    """How far a long command is, and the callback that updates its bar: the next step, finished steps, all steps."""

    bar: Progress
    task: TaskID
    verb: str
    done: int = 0
    total: int = 0

    def __call__(self, step: str, done: int, total: int) -> None:
        self.done = done
        self.total = total
        self.bar.update(self.task, description=f"{self.verb} {step}", completed=done, total=total)


@contextmanager
def step_bar(verb: str) -> Iterator[StepProgress]:
    """Show a bar with the step that is running; yields a callback that takes the step and the numbers of steps."""
    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        yield StepProgress(bar, bar.add_task(verb, total=None), verb)
