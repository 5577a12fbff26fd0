"""The commands that measure the speed of one text: bench decode and bench prefill. bench_serve.py has bench serve.

clearhead bench decode smollm2 --against huggingface,llama.cpp --weights bfloat16,int4
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import MofNCompleteColumn
from typer.core import TyperGroup

from clearhead.cli.app import (
    JsonOption,
    app,
    errors,
    loading_bar,
    print_json,
    print_message,
    progress_bar,
    table_console,
)
from clearhead.cli.checks import check_architecture, check_device
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError, unknown_name

if TYPE_CHECKING:
    from clearhead.benchmark import BenchmarkTarget

WEIGHTS = ("float32", "bfloat16", "int8", "int4", "stored")  # those of clearhead.benchmark, which imports torch
ENGINES = ("huggingface", "llama.cpp", "ctranslate2")
_DEFAULT_WEIGHTS = {"cpu": "float32,bfloat16,int8,int4", "cuda": "bfloat16,int8"}
_EXAMPLE = "Example: `clearhead bench decode smollm2 --against huggingface,llama.cpp --weights bfloat16,int4`"


class _Commands(TyperGroup):
    """The subcommands, and a suggestion for a name that is none of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            raise unknown_name("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


bench_app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    help="Measure the speed of Clearhead and other engines: of one text (decode, prefill) or of many at once (serve).",
    epilog=_EXAMPLE,
)
app.add_typer(bench_app, name="bench")

BenchModelArgument = Annotated[
    str,
    typer.Argument(
        help="The name of an installed model, a folder, a .gguf file or a Hub id; or a preset, to run it with random "
        "weights.",
        metavar="MODEL",
    ),
]
AgainstOption = Annotated[
    str, typer.Option(help="Other engines, separated by commas: huggingface, llama.cpp, ctranslate2.")
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="Weight formats, separated by commas: float32, bfloat16, int8, int4, and stored for the quantized "
        "blocks of a .gguf file. By default float32,bfloat16,int8,int4, or bfloat16,int8 on CUDA."
    ),
]
RoundsOption = Annotated[int, typer.Option(help="Number of rounds; every engine runs once in each.")]
BenchDeviceOption = Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")]


@bench_app.command(epilog=_EXAMPLE)
@takes_threads
def decode(
    model: BenchModelArgument,
    against: AgainstOption = "",
    weights: WeightsOption = None,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="Number of prompt tokens; or several, such as 128,1024,8192, to measure how the time per token grows.",
        ),
    ] = "128",
    new_tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 128,
    rounds: RoundsOption = 5,
    device: BenchDeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the speed of decoding, and compare it with this machine's memory bandwidth."""
    if new_tokens < 2:
        raise ClearheadError(
            f"--new-tokens is {new_tokens}; decoding is measured from the second token on, so it must be at least 2"
        )
    lengths = parse_counts(prompt_tokens, "--prompt-tokens", "128,1024,8192")
    _measure(model, against, weights, lengths, new_tokens, rounds, device, as_json)


@bench_app.command(epilog="Example: `clearhead bench prefill smollm2 --against ctranslate2,llama.cpp --weights int8`")
@takes_threads
def prefill(
    model: BenchModelArgument,
    against: AgainstOption = "",
    weights: WeightsOption = None,
    prompt_tokens: Annotated[int, typer.Option(help="Number of prompt tokens.")] = 512,
    rounds: RoundsOption = 5,
    device: BenchDeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the speed of reading a prompt."""
    _measure(model, against, weights, [prompt_tokens], 1, rounds, device, as_json)


def _measure(
    model: str,
    against: str,
    weights: str | None,
    lengths: list[int],
    num_tokens: int,
    rounds: int,
    device: str,
    as_json: bool,
) -> None:
    """Measure the engines with prompts of these lengths and print the results: with several, how the time grows."""
    for option, count in (("--prompt-tokens", min(lengths)), ("--rounds", rounds)):
        if count < 1:
            raise ClearheadError(f"{option} is {count}; it must be at least 1")
    growth = len(lengths) > 1
    formats, others = check_engines(model, device, weights, _DEFAULT_WEIGHTS, against, ENGINES)
    from clearhead.benchmark import measure_growth, measure_speed, num_runs, open_engines, print_growth, print_speeds

    with tempfile.TemporaryDirectory() as folder:
        target = open_target(model, device, formats, max(lengths) + num_tokens, Path(folder))
        with errors.status("preparing"):
            engines = open_engines(target, formats, others, partial(print_message, "note"))
        with runs_bar(num_runs(engines, len(lengths), rounds)) as on_run:
            if growth:
                growths = measure_growth(engines, target, lengths, num_tokens, rounds, on_run)
            else:
                speeds = measure_speed(engines, target, lengths[0], num_tokens, rounds, on_run)
    if as_json:
        print_json([asdict(result) for result in (growths if growth else speeds)])
    elif growth:
        print_growth(growths, table_console())
    else:
        print_speeds(speeds, num_tokens, table_console())


# --- shared with bench serve


def check_engines(
    model: str, device: str, weights: str | None, defaults: dict[str, str], against: str, engines: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Return the weight formats and the other engines. Raise ClearheadError for a wrong name, also of the model."""
    formats = _split_names(defaults.get(device, defaults["cuda"]) if weights is None else weights)
    others = _split_names(against)
    for kind, names, known in (("weight format", formats, WEIGHTS), ("engine", others, engines)):
        if unknown := [name for name in names if name not in known]:
            raise unknown_name(kind, unknown[0], known)
    if not formats:
        raise ClearheadError(f"there are no weights to measure; choose from {', '.join(WEIGHTS)}")
    check_device(device)
    check_architecture(model)
    return formats, others


def parse_counts(text: str, option: str, example: str) -> list[int]:
    """Return distinct positive integers in ascending order. Raise ClearheadError for anything else."""
    parts = _split_names(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ClearheadError(
            f"{option} is {text!r}; it must be positive integers separated by commas, such as {example}"
        )
    return sorted(set(map(int, parts)))


def _split_names(text: str) -> list[str]:
    """Return the distinct parts between commas."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


@contextmanager
def runs_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar over the runs of all engines; yield the function that announces a run."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda description: bar.update(task, description=description, advance=1)


def open_target(model: str, device: str, weights: list[str], capacity: int, folder: Path) -> "BenchmarkTarget":
    """Load the model in float32 if that is measured, else in bfloat16; a preset gets random weights."""
    from clearhead.api import DTYPES, load, resolve_device
    from clearhead.benchmark import BenchmarkTarget, create_random_model
    from clearhead.checkpoint import resolve_path
    from clearhead.families import preset, presets

    dtype, torch_device = DTYPES["float32" if "float32" in weights else "bfloat16"], resolve_device(device)
    assert torch_device is not None
    if model in presets() and not Path(model).exists():
        return BenchmarkTarget(create_random_model(preset(model), dtype, torch_device), None, capacity, folder)
    path = resolve_path(model)
    with loading_bar(model) as progress:
        loaded = load(path, dtype=dtype, device=torch_device, progress=progress, fast=False)
    return BenchmarkTarget(loaded, path, capacity, folder)
