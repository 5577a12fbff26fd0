"""The command that judges: eval.

clearhead eval smollm2 --task hellaswag --limit 200
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from clearhead.cli.app import JsonOption, ModelArgument, app, download_bar, loading_bar, print_json, progress_bar
from clearhead.errors import ClearheadError, unknown_name

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.evaluation import Result

DATASET = "evaluation-sets"
QUESTIONS = ("arc-challenge", "arc-easy", "hellaswag", "lambada", "piqa", "winogrande")
DATA = ("text", "source", "target", "table")
NEEDED = {"perplexity": ("text",), "translation": ("source", "target"), "pairs": ("table",)}
OPTIONS = {
    "perplexity": ("context", "stride", "batch_tokens"),
    **dict.fromkeys(QUESTIONS, ("limit", "batch_tokens")),
    "translation": ("beams", "max_new_tokens", "limit"),
    "pairs": ("unit", "beams", "max_new_tokens", "limit"),
}
TASK_OPTIONS = {*DATA, *(name for names in OPTIONS.values() for name in names)}


@app.command(
    "eval",
    epilog="Examples: `clearhead eval smollm2 --task perplexity --text book.txt --context 1024`, "
    "`clearhead eval smollm2 --task arc-easy --limit 200 --json`",
)
def evaluate(
    call: typer.Context,
    model: ModelArgument,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIONS)}.")],
    text: Annotated[Path | None, typer.Option(help="perplexity: the text, in UTF-8.")] = None,
    context: Annotated[int | None, typer.Option(help="perplexity: tokens of a window; what the model reads.")] = None,
    stride: Annotated[int | None, typer.Option(help="perplexity: tokens from window to window; half of one.")] = None,
    source: Annotated[Path | None, typer.Option(help="translation: sentences, one a line.")] = None,
    target: Annotated[Path | None, typer.Option(help="translation: what they should become, line by line.")] = None,
    table: Annotated[Path | None, typer.Option(help="pairs: two columns with a tab between, asked and wanted.")] = None,
    unit: Annotated[str | None, typer.Option(help="pairs: what an edit changes, word or character; word.")] = None,
    beams: Annotated[int | None, typer.Option(help="Beams of the search; 5 for translation, else 1.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="The longest answer; 256.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many examples.")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens read at once; 8192.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored otherwise.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure how good a model is: by a text, by questions, by translations or other answers."""
    from clearhead.api import load

    given = {name: value for name, value in call.params.items() if name in TASK_OPTIONS and value is not None}
    check_options(task, given)
    data = read_data(task, given)
    with loading_bar(model) as progress:
        loaded = load(model, dtype=dtype, device=device, progress=progress)
    with examples_bar(task) as tell:
        result = run(loaded, task, data, {name: value for name, value in given.items() if name not in DATA}, tell)
    if as_json:
        print_json({"model": model} | result.as_dict())
    else:
        print_result(result, model)


def check_options(task: str, given: Mapping[str, Any]) -> None:
    """All that a task needs, and nothing without an effect on it."""
    if task not in OPTIONS:
        raise unknown_name("task", task, OPTIONS)
    for name in given:
        if name not in (*NEEDED.get(task, ()), *OPTIONS[task]):
            raise ClearheadError(f"{option(name)} has no effect on {task}; leave it out")
    for name in NEEDED.get(task, ()):
        if name not in given:
            raise ClearheadError(f"{task} needs {option(name)}, a file to read")
    for name in ("limit", "batch_tokens", "max_new_tokens", "beams"):
        if given.get(name, 1) < 1:
            raise ClearheadError(f"{option(name)} is {given[name]}; it must be 1 or more")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_data(task: str, given: Mapping[str, Any]) -> Any:
    """What the task asks of a model, before the model is read."""
    from clearhead.catalog import store
    from clearhead.data import read_parallel, read_table, read_text

    match task:
        case "perplexity":
            return read_text(given["text"])
        case "translation":
            return read_parallel(given["source"], given["target"])[: given.get("limit")]
        case "pairs":
            return read_table(given["table"])[: given.get("limit")]
    with download_bar(DATASET) as progress:
        return store.get(DATASET, progress)


def run(
    model: "Model", task: str, data: Any, options: Mapping[str, Any], progress: Callable[[int, int], None]
) -> "Result":
    from clearhead.evaluation import ask, pairs, perplexity, translation

    if task in QUESTIONS:
        return ask(model, task, data, progress=progress, **options)
    apart = {name: value for name, value in options.items() if name != "limit"}
    judges: dict[str, Callable[..., Result]] = {"perplexity": perplexity, "translation": translation, "pairs": pairs}
    return judges[task](model, data, progress=progress, **apart)


@contextmanager
def examples_bar(task: str) -> Iterator[Callable[[int, int], None]]:
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        number = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)


def print_result(result: "Result", model: str) -> None:
    shown = Table(title=f"{model}, {result.task}: {result.num_examples:,} examples", title_justify="left", box=None)
    shown.add_column("measure")
    shown.add_column("value", justify="right")
    shown.add_column("± standard error", justify="right")
    for one in result.measures:
        error = "" if one.standard_error is None else f"{one.standard_error:,.4f}"
        shown.add_row(one.name.replace("_", " "), f"{one.value:,.4f}", error)
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    console.print(shown)
    for name, value in result.settings.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)
