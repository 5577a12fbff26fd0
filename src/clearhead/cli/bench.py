"""The command that measures: bench.

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

from clearhead.cli.app import JsonOption, app, errors, loading_bar, print_json, progress_bar, table_console, tell
from clearhead.errors import ClearheadError, unknown_name

if TYPE_CHECKING:
    from clearhead.benchmark import Subject

PROMPT_LENGTHS = {"decode": 128, "prefill": 512}
NUM_TOKENS = 128
WEIGHTS = {"cpu": "float32,bfloat16,int8,int4", "cuda": "bfloat16,int8"}


@app.command(epilog="Example: `clearhead bench decode smollm2 --against huggingface,llama.cpp --weights bfloat16,int4`")
def bench(
    phase: Annotated[str, typer.Argument(help="decode or prefill.")],
    model: Annotated[
        str, typer.Argument(help="Installed name, folder, .gguf file or hub id; a preset: at random weights.")
    ],
    against: Annotated[str, typer.Option(help="Peers, of huggingface,llama.cpp,ctranslate2.")] = "",
    weights: Annotated[
        str | None,
        typer.Option(help="Of float32,bfloat16,int8,int4 (all, or bfloat16,int8 on CUDA) and stored: a .gguf file's."),
    ] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens to read; 128, or 512 for prefill.")] = None,
    tokens: Annotated[int | None, typer.Option(help=f"Tokens to make; {NUM_TOKENS}.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Prompts of these lengths, as 128,1024,8192: how the cost of a token grows.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="In each of them every engine has its turn.")] = 5,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure speed: this package and its peers in one run, in turns, beside the bandwidth of this machine."""
    from clearhead.benchmark import check_names, line_up, measure, measure_growth, num_steps, report

    lengths = prompt_lengths(phase, prompt, tokens, contexts)
    num_tokens = 1 if phase == "prefill" else NUM_TOKENS if tokens is None else tokens
    if num_tokens < (1 if phase == "prefill" else 2) or min(lengths) < 1 or rounds < 1:
        raise ClearheadError("a measurement takes a prompt of 1 token or more, 2 tokens to decode, and 1 round")
    kinds = named(WEIGHTS.get(device, WEIGHTS["cuda"]) if weights is None else weights)
    check_names(kinds, named(against))
    with tempfile.TemporaryDirectory() as folder:
        subject = open_subject(model, device, kinds, max(lengths) + num_tokens, Path(folder))
        with errors.status("preparing"):
            engines = line_up(subject, kinds, named(against), partial(tell, "note"))
        with turns_bar(num_steps(engines, len(lengths), rounds)) as turned:
            if contexts is None:
                results = measure(engines, subject, lengths[0], num_tokens, rounds, turned)
            else:
                grown = measure_growth(engines, subject, lengths, num_tokens, rounds, turned)
    if as_json:
        print_json([asdict(row) for row in (results if contexts is None else grown)])
    elif contexts is None:
        report.print_results(results, num_tokens, table_console())
    else:
        report.print_growth(grown, table_console())


@contextmanager
def turns_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Over the turns of all engines."""
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda said: bar.update(task, description=said, advance=1)


def prompt_lengths(phase: str, prompt: int | None, tokens: int | None, contexts: str | None) -> list[int]:
    """One, or those of --contexts; a setting without an effect is refused."""
    if phase not in PROMPT_LENGTHS:
        raise unknown_name("phase", phase, PROMPT_LENGTHS)
    if phase == "prefill" and (tokens is not None or contexts is not None):
        raise ClearheadError("prefill reads a prompt and decodes nothing; leave out --tokens and --contexts")
    if contexts is None:
        return [PROMPT_LENGTHS[phase] if prompt is None else prompt]
    if prompt is not None:
        raise ClearheadError("--contexts says how long the prompts are; leave out --prompt")
    lengths = named(contexts)
    if not lengths or not all(length.isdecimal() for length in lengths):
        raise ClearheadError(f"--contexts is {contexts!r}; it must be whole numbers, as 128,1024,8192")
    return sorted(set(map(int, lengths)))


def named(text: str) -> list[str]:
    """The parts between commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def open_subject(model: str, device: str, weights: list[str], capacity: int, folder: Path) -> "Subject":
    """In float32 where that is measured, else in bfloat16."""
    from clearhead.api import DTYPES, load, resolve_device
    from clearhead.benchmark import Subject, draw
    from clearhead.checkpoint import HUB_FILE_PATTERNS, locate
    from clearhead.families import preset, presets

    dtype, place = DTYPES["float32" if "float32" in weights else "bfloat16"], resolve_device(device)
    assert place is not None
    if model in presets() and not Path(model).exists():
        return Subject(draw(preset(model), dtype, place), None, capacity, folder)
    path = locate(model, HUB_FILE_PATTERNS)
    with loading_bar(model) as progress:
        return Subject(load(path, dtype=dtype, device=place, progress=progress, fast=False), path, capacity, folder)
