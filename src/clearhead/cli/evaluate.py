"""The command that evaluates a model: eval.

clearhead eval smollm2 --task hellaswag --limit 200
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from clearhead.cli.app import (
    JsonOption,
    ModelArgument,
    app,
    download_bar,
    format_bytes,
    print_json,
    print_message,
    progress_bar,
)
from clearhead.cli.checks import check_files, check_installed, check_model_options
from clearhead.cli.generate import DeviceOption, DtypeOption, load_model
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError, unknown_name
from clearhead.terminal import TerminalConsole

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.evaluation import EvaluationResult

DATASET = "evaluation-sets"
MULTIPLE_CHOICE = ("arc-challenge", "arc-easy", "hellaswag", "lambada", "piqa", "winogrande")
_FILE_OPTIONS = ("text", "source", "target", "table")
_REQUIRED_OPTIONS = {"perplexity": ("text",), "translation": ("source", "target"), "pairs": ("table",)}
OPTIONS = {
    "perplexity": ("context", "stride", "batch_tokens"),
    **dict.fromkeys(MULTIPLE_CHOICE, ("limit", "batch_tokens")),
    "translation": ("beams", "max_new_tokens", "limit"),
    "pairs": ("unit", "beams", "max_new_tokens", "limit"),
}
_TASK_OPTIONS = {*_FILE_OPTIONS, *(name for names in OPTIONS.values() for name in names)}


@app.command(
    "eval",
    epilog="Examples: `clearhead eval smollm2 --task perplexity --text book.txt --context 1024`, "
    "`clearhead eval smollm2 --task arc-easy --limit 200 --json`",
)
@takes_threads
def evaluate(
    call: typer.Context,
    model: ModelArgument,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIONS)}.")],
    text: Annotated[Path | None, typer.Option(help="For perplexity: a text file in UTF-8.")] = None,
    context: Annotated[
        int | None, typer.Option(help="For perplexity: tokens per window; by default the model's context.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="For perplexity: tokens between the starts of windows; by default half a window.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="For translation: a file with the sentences to translate, one per line.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="For translation: a file with the reference translations, one per line.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="For pairs: a file with two columns, source and target, separated by a tab.")
    ] = None,
    unit: Annotated[
        str | None, typer.Option(help="For pairs: what the error rate counts, word or character; by default word.")
    ] = None,
    beams: Annotated[
        int | None, typer.Option(help="Number of beams; by default 5 for translation and 1 for pairs.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens in an answer; by default 256.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Evaluate only this many examples; by default all.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens in a batch; by default 8192.")
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on a task.

    perplexity scores a text. arc-challenge, arc-easy, hellaswag, lambada, piqa and winogrande are benchmarks with known
    answers; the first use downloads their questions (86 MB). translation reports BLEU and chrF. pairs compares
    generated answers with targets: exact matches, and the error rate in words or characters.
    """
    given = {name: value for name, value in call.params.items() if name in _TASK_OPTIONS and value is not None}
    _check_options(task, given)
    check_files(given[name] for name in _FILE_OPTIONS if name in given)
    if task == "translation":
        check_installed(["sacrebleu"], "the task translation", "eval")
    check_model_options(model, dtype, device)
    data = _read_data(task, given)
    loaded = load_model(model, dtype, device)
    options = {name: value for name, value in given.items() if name not in _FILE_OPTIONS}
    with _examples_bar(task) as progress:
        result = _run_task(loaded, task, data, options, progress)
    if as_json:
        print_json({"model": model} | result.as_dict())
    else:
        _print_result(result, model)


def _check_options(task: str, given: Mapping[str, Any]) -> None:
    """Raise ClearheadError if an option is missing, has no effect on the task or is out of range."""
    if task not in OPTIONS:
        raise unknown_name("task", task, OPTIONS)
    for name in given:
        if name not in (*_REQUIRED_OPTIONS.get(task, ()), *OPTIONS[task]):
            raise ClearheadError(f"{_option_name(name)} has no effect on the task {task}; leave it out")
    for name in _REQUIRED_OPTIONS.get(task, ()):
        if name not in given:
            raise ClearheadError(f"the task {task} needs a file; add {_option_name(name)} FILE")
    for name in ("limit", "batch_tokens", "max_new_tokens", "beams"):
        if given.get(name, 1) < 1:
            raise ClearheadError(f"{_option_name(name)} is {given[name]}; it must be at least 1")


def _option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_data(task: str, given: Mapping[str, Any]) -> Any:
    """Return the data of a task, or the folder of the questions. It is read before the model, to find errors early."""
    from clearhead.catalog import find_installed, find_package, get
    from clearhead.data import read_parallel, read_table, read_text

    match task:
        case "perplexity":
            return read_text(given["text"])
        case "translation":
            return read_parallel(given["source"], given["target"])[: given.get("limit")]
        case "pairs":
            return read_table(given["table"])[: given.get("limit")]
    if find_installed(DATASET) is None:
        print_message("note", f"downloading the questions once, {format_bytes(find_package(DATASET).archive_bytes)}")
    with download_bar(DATASET) as progress:
        return get(DATASET, progress)


def _run_task(
    model: "Model", task: str, data: Any, options: Mapping[str, Any], progress: Callable[[int, int], None]
) -> "EvaluationResult":
    """Run the evaluation of a task."""
    from clearhead.evaluation import evaluate_multiple_choice, evaluate_pairs, evaluate_perplexity, evaluate_translation

    if task in MULTIPLE_CHOICE:
        return evaluate_multiple_choice(model, task, data, progress=progress, **options)
    options = {name: value for name, value in options.items() if name != "limit"}  # _read_data has applied it
    match task:
        case "perplexity":
            return evaluate_perplexity(model, data, progress=progress, **options)
        case "translation":
            return evaluate_translation(model, data, progress=progress, **options)
        case _:
            return evaluate_pairs(model, data, progress=progress, **options)


@contextmanager
def _examples_bar(task: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar over the examples of a task; yield the function that updates it."""
    with progress_bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        bar_task = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(bar_task, completed=done, total=total)


def _print_result(result: "EvaluationResult", model: str) -> None:
    """Print the metrics as a table, then the settings."""
    table = Table(title=f"{model}, {result.task}: {result.num_examples:,} examples", title_justify="left", box=None)
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("± standard error", justify="right")
    for metric in result.metrics:
        error = "" if metric.standard_error is None else f"{metric.standard_error:,.4f}"
        table.add_row(metric.name.replace("_", " "), f"{metric.value:,.4f}", error)
    console = TerminalConsole(soft_wrap=True)
    console.print(table)
    for name, value in result.settings.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)
