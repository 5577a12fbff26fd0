"""Commands that make text, and the proof that they make it right: generate, chat, verify, demo.

clearhead generate smollm2 "The capital of France is"
"""

import sys
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.app import (
    JsonOption,
    ModelArgument,
    app,
    download_bar,
    errors,
    loading_bar,
    print_json,
    table_console,
    tell,
)
from clearhead.cli.sampling import takes_sampling
from clearhead.errors import ClearheadError, unknown_name
from clearhead.options import CHAT, SamplingOptions, check_effect

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.generation import Generation, Stream

DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as stored otherwise.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, mps.")]
WeightsOption = Annotated[
    str, typer.Option(help="full, int8, int4, or stored: a .gguf file in its own blocks.", rich_help_panel="Speed")
]
FastOption = Annotated[
    bool | None,
    typer.Option(
        "--fast/--no-fast",
        help="Make tokens in kernels, built for this processor in seconds, once; used unasked from then on.",
        rich_help_panel="Speed",
    ),
]
SEARCH = {"rich_help_panel": "Search"}
PAST_CONTEXT = "the text goes past the {context:,} tokens this model was made for; expect it to lose the thread there"
WEIGHTS = ("full", "stored", "int8", "int4")  # those of bundle.py, known here without PyTorch


@app.command(epilog='Example: `clearhead generate smollm2 "The capital of France is" --max-new-tokens 20`')
@takes_sampling(SamplingOptions())
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue or translate; - reads it from standard input.")],
    sampling: dict[str, Any],
    n: Annotated[int, typer.Option("--n", help="How many texts.", **SEARCH)] = 1,
    beams: Annotated[int | None, typer.Option(help="Search with so many beams.", **SEARCH)] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Of beams; above 0 favours long texts.", **SEARCH)
    ] = None,
    speculate: Annotated[
        str | None, typer.Option(help="Guess ahead: `lookup`, or a smaller model of the same kind.", **SEARCH)
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, with so many alternatives.")
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "full",
    fast: FastOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, printed as it comes; an encoder-decoder answers it."""
    check_weights(weights)
    if beams is None:
        check_effect(sampling, n)
    if logprobs is not None and not as_json:
        raise ClearheadError("log-probabilities are shown with --json only")
    from clearhead.api import RecurrentBaseline

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    loaded = load_model(model, dtype, device, weights, fast)
    asked = {"beams": beams, "length_penalty": length_penalty, "logprobs": logprobs}
    options = sampling | {name: value for name, value in asked.items() if value is not None}
    if speculate is not None:
        options["speculate"] = guesser(speculate, dtype, device)
    if beams is None and n == 1 and not as_json and not isinstance(loaded, RecurrentBaseline):
        made = [print_stream(loaded.stream(text, **options))]
    else:
        made = loaded.generate_many([text], n, **options)
        print_texts(text, made, as_json)
    warn_of_context(made, loaded.network.config.context)


@app.command(epilog="Example: `clearhead chat smollm2`")
@takes_sampling(CHAT)
def chat(
    model: ModelArgument,
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="What the assistant is told first.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "full",
    fast: FastOption = None,
) -> None:
    """Talk to a model. /help lists what else can be typed; Ctrl-C stops an answer, Ctrl-D leaves."""
    check_weights(weights)
    check_effect(sampling)
    from clearhead.cli.terminal import talk

    talk(load_model(model, dtype, device, weights, fast).chat(system), sampling)


@app.command(epilog="Example: `clearhead verify smollm2 --tokens 64`")
def verify(
    model: ModelArgument,
    tokens: Annotated[int | None, typer.Option(help="How many the loops make; 256, or 32 for a large model.")] = None,
    length: Annotated[int | None, typer.Option(help="Of the text read, in tokens; enough to pass windows.")] = None,
    compiles: Annotated[bool, typer.Option("--compile", help="Also try torch.compile, which takes a minute.")] = False,
    dtype: Annotated[str, typer.Option(help="float32 shows most; also float64, bfloat16, float16.")] = "float32",
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prove on this model that caches, batches, padding and kernels change nothing. Exit code 1 where one does."""
    from clearhead.verification import checks, print_findings

    loaded = load_model(model, dtype, device, fast=False)
    findings = []
    with errors.status("verifying") as status:
        for finding in checks.verify(loaded, length=length, num_new=tokens, compiles=compiles):
            findings.append(finding)
            status.update(f"verified {finding.check}")
    if as_json:
        print_json([finding.as_data() for finding in findings])
    else:
        print_findings(findings, loaded, table_console())
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command(epilog="Example: `clearhead demo`")
def demo() -> None:
    """See it work: fetch SmolLM2, continue a sentence, show how the model is built. Under two minutes."""
    from clearhead.cli.demo import run

    run(download_bar)


# --- what they share


def check_weights(name: str) -> None:
    if name not in WEIGHTS:
        raise unknown_name("weights", name, WEIGHTS)


def load_model(
    name: str, dtype: str | None, device: str | None, weights: str = "full", fast: bool | None = None
) -> "Model":
    from clearhead.api import load

    with loading_bar(name) as progress:
        return load(name, dtype, device, progress, weights=weights, fast=fast)  # type: ignore[arg-type]


def guesser(name: str, dtype: str | None, device: str | None) -> "Model | str":
    if name == "lookup":
        return name
    try:
        return load_model(name, dtype, device)
    except ClearheadError:
        if get_close_matches(name, ["lookup"]):
            raise unknown_name("way to speculate", name, ["lookup"]) from None
        raise


def print_stream(stream: "Stream") -> "Generation":
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return stream.generation


def print_texts(prompt: str, made: "list[Generation]", as_json: bool) -> None:
    """One text as it is, one object as JSON; several are numbered, or a list."""
    if as_json:
        told = [{"prompt": prompt} | asdict(one) for one in made]
        print_json(told[0] if len(told) == 1 else told)
        return
    for number, one in enumerate(made, start=1):
        typer.echo(one.text if len(made) == 1 else f"[{number}] {one.text}")


def warn_of_context(made: "list[Generation]", context: int) -> None:
    if any(one.num_past_context for one in made):
        tell("note", PAST_CONTEXT.format(context=context))
    elif any(one.finish_reason == "context" for one in made):
        tell("note", f"the text ends where the model does, at {context:,} tokens")
