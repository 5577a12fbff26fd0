"""The command that measures speed: bench.

clearhead bench decode smollm2 --against huggingface,llama.cpp --weights bfloat16,int4
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn

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

_PROMPT_LENGTHS = {"decode": 128, "prefill": 512}
NUM_TOKENS = 128
WEIGHTS = ("float32", "bfloat16", "int8", "int4", "stored")  # those of clearhead.benchmark, which imports torch
ENGINES = ("huggingface", "llama.cpp", "ctranslate2")
_DEFAULT_WEIGHTS = {"cpu": "float32,bfloat16,int8,int4", "cuda": "bfloat16,int8"}


@app.command(epilog="Example: `clearhead bench decode smollm2 --against huggingface,llama.cpp --weights bfloat16,int4`")
@takes_threads
def bench(
    phase: Annotated[str, typer.Argument(help="What to measure: decode or prefill.")],
    model: Annotated[
        str,
        typer.Argument(
            help="An installed name, a folder, a .gguf file or a Hub id; or a preset, to run it with random weights."
        ),
    ],
    against: Annotated[
        str, typer.Option(help="Other engines, separated by commas: huggingface, llama.cpp, ctranslate2.")
    ] = "",
    weights: Annotated[
        str | None,
        typer.Option(
            help="Weight formats, separated by commas: float32, bfloat16, int8, int4, and stored for the blocks of a "
            ".gguf file. By default float32,bfloat16,int8,int4, or bfloat16,int8 on CUDA."
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Number of prompt tokens; by default 128, or 512 for prefill.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help=f"Number of tokens to generate; by default {NUM_TOKENS}.")] = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Prompt lengths in tokens, such as 128,1024,8192, to measure how the time per token grows."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Number of rounds; every engine runs once in each.")] = 5,
    device: Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the speed of Clearhead and other engines, and compare it with this machine's memory bandwidth."""
    lengths = _prompt_lengths(phase, prompt, tokens, contexts)
    num_tokens = 1 if phase == "prefill" else NUM_TOKENS if tokens is None else tokens
    if num_tokens < (1 if phase == "prefill" else 2) or min(lengths) < 1 or rounds < 1:
        raise ClearheadError("a benchmark needs a prompt of at least 1 token, at least 2 new tokens, and 1 round")
    formats = _split_names(_DEFAULT_WEIGHTS.get(device, _DEFAULT_WEIGHTS["cuda"]) if weights is None else weights)
    for kind, names, known in (("weight format", formats, WEIGHTS), ("engine", _split_names(against), ENGINES)):
        if unknown := [name for name in names if name not in known]:
            raise unknown_name(kind, unknown[0], known)
    check_device(device)
    if formats:
        check_architecture(model)
    from clearhead.benchmark import (
        check_engine_names,
        measure_growth,
        measure_speed,
        num_runs,
        open_engines,
        print_growth,
        print_speeds,
    )

    check_engine_names(formats, _split_names(against))
    with tempfile.TemporaryDirectory() as folder:
        target = _open_target(model, device, formats, max(lengths) + num_tokens, Path(folder))
        with errors.status("preparing"):
            engines = open_engines(target, formats, _split_names(against), partial(print_message, "note"))
        with _runs_bar(num_runs(engines, len(lengths), rounds)) as on_run:
            if contexts is None:
                speeds = measure_speed(engines, target, lengths[0], num_tokens, rounds, on_run)
            else:
                growth = measure_growth(engines, target, lengths, num_tokens, rounds, on_run)
    if as_json:
        print_json([asdict(result) for result in (speeds if contexts is None else growth)])
    elif contexts is None:
        print_speeds(speeds, num_tokens, table_console())
    else:
        print_growth(growth, table_console())


@contextmanager
def _runs_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar over the runs of all engines; yield the function that announces a run."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda description: bar.update(task, description=description, advance=1)


def _prompt_lengths(phase: str, prompt: int | None, tokens: int | None, contexts: str | None) -> list[int]:
    """Return the prompt length, or those of --contexts. Raise ClearheadError for an option without effect."""
    if phase not in _PROMPT_LENGTHS:
        raise unknown_name("phase", phase, _PROMPT_LENGTHS)
    if phase == "prefill" and (tokens is not None or contexts is not None):
        raise ClearheadError("prefill reads a prompt and generates nothing; leave out --tokens and --contexts")
    if contexts is None:
        return [_PROMPT_LENGTHS[phase] if prompt is None else prompt]
    if prompt is not None:
        raise ClearheadError("--contexts sets the prompt lengths; leave out --prompt")
    lengths = _split_names(contexts)
    if not lengths or not all(length.isdecimal() for length in lengths):
        raise ClearheadError(f"--contexts is {contexts!r}; it must be integers such as 128,1024,8192")
    return sorted(set(map(int, lengths)))


def _split_names(text: str) -> list[str]:
    """Return the distinct parts between commas."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _open_target(model: str, device: str, weights: list[str], capacity: int, folder: Path) -> "BenchmarkTarget":
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
