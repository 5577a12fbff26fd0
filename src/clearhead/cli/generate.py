"""The commands generate, chat, verify and demo.

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
    print_message,
    table_console,
)
from clearhead.cli.sampling import takes_sampling
from clearhead.errors import ClearheadError, unknown_name
from clearhead.options import (
    CHAT_DEFAULTS,
    BeamOptions,
    SamplingOptions,
    check_temperature_is_set,
    description_of,
    option_fields,
)

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.generation import Generation, Stream

DtypeOption = Annotated[
    str | None,
    typer.Option(help="Precision: float32, bfloat16, float16 or float64; by default that of the model's file."),
]
DeviceOption = Annotated[str | None, typer.Option(help="Device to run on: cpu, cuda or mps; by default cpu.")]
WeightsOption = Annotated[
    str,
    typer.Option(
        help="Format of the weights: full, int8 or int4 (quantized on loading), or stored (the blocks of a .gguf "
        "file). All but full compute in bfloat16 unless --dtype is given.",
        rich_help_panel="Speed",
    ),
]
FastOption = Annotated[
    bool | None,
    typer.Option(
        "--fast/--no-fast",
        help="Use the C++ kernels on a CPU, and compile them first if necessary; by default they are used if they are "
        "already compiled.",
        rich_help_panel="Speed",
    ),
]
_SEARCH = {"rich_help_panel": "Search"}
PAST_CONTEXT = "the text is longer than the model's context of {context:,} tokens; its quality may degrade beyond that"
WEIGHTS = ("full", "stored", "int8", "int4")  # those of clearhead.checkpoint, which imports torch
_BEAM_DESCRIPTIONS = {each.name: description_of(each) for each in option_fields(BeamOptions)}


@app.command(epilog='Example: `clearhead generate smollm2 "The capital of France is" --max-new-tokens 20`')
@takes_sampling(SamplingOptions())
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue or translate; - reads it from standard input.")],
    sampling: dict[str, Any],
    n: Annotated[int, typer.Option("--n", help="Number of texts: samples, or the best beams.", **_SEARCH)] = 1,
    beams: Annotated[
        int | None,
        typer.Option(help="Search with this number of beams; by default there is no beam search.", **_SEARCH),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help=f"{_BEAM_DESCRIPTIONS['length_penalty']} By default {BeamOptions.length_penalty}.", **_SEARCH
        ),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="Decode speculatively: `lookup` drafts tokens by copying from the text; any other value is a smaller "
            "model with the same vocabulary, which drafts them.",
            **_SEARCH,
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: also print the log-probability of each token, and of this many most likely alternatives."
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "full",
    fast: FastOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text, or translate it with an encoder-decoder, and print the result while it is generated."""
    _check_weights(weights)
    if beams is None:
        check_temperature_is_set(sampling, n)
    if logprobs is not None and not as_json:
        raise ClearheadError("--logprobs needs --json, which prints the log-probabilities; add --json")
    from clearhead.api import RecurrentBaseline

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    loaded = load_model(model, dtype, device, weights, fast)
    given = {"beams": beams, "length_penalty": length_penalty, "logprobs": logprobs}
    options = sampling | {name: value for name, value in given.items() if value is not None}
    if speculate is not None:
        options["speculate"] = _load_speculation(speculate, dtype, device)
    if beams is None and n == 1 and not as_json and not isinstance(loaded, RecurrentBaseline):
        generations = [_print_stream(loaded.stream(text, **options))]
    else:
        generations = loaded.generate_many([text], n, **options)
        _print_generations(text, generations, as_json)
    _warn_about_context(generations, loaded.network.config.context)


@app.command(epilog="Example: `clearhead chat smollm2`")
@takes_sampling(CHAT_DEFAULTS)
def chat(
    model: ModelArgument,
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="System message: instructions for the whole conversation.")] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "full",
    fast: FastOption = None,
) -> None:
    """Chat with a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D quits."""
    _check_weights(weights)
    check_temperature_is_set(sampling)
    from clearhead.cli.terminal import run_chat

    run_chat(load_model(model, dtype, device, weights, fast).chat(system), sampling)


@app.command(epilog="Example: `clearhead verify smollm2 --tokens 64`")
def verify(
    model: ModelArgument,
    tokens: Annotated[
        int | None,
        typer.Option(help="Number of tokens to generate; by default 256, or 32 above a billion parameters."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens of the longest text; by default 96, or more to exceed the model's sliding windows."
        ),
    ] = None,
    compiles: Annotated[
        bool, typer.Option("--compile", help="Also check torch.compile, which takes a minute.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Precision: float32, float64, bfloat16 or float16. The last two hide small errors.")
    ] = "float32",
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify that caches, batches, padding, speculation and kernels do not change this model's logits.

    Every check prints the largest difference from a plain forward pass and its tolerance. Packed weights are compared
    too, and transformers if it is installed. The exit code is 1 if a check fails.
    """
    from clearhead.verification import print_results
    from clearhead.verification import verify as run_checks

    loaded = load_model(model, dtype, device, fast=False)
    results = []
    with errors.status("verifying") as status:
        for result in run_checks(loaded, length=length, num_new_tokens=tokens, compiles=compiles):
            results.append(result)
            status.update(f"verified {result.check}")
    if as_json:
        print_json([result.as_data() for result in results])
    else:
        print_results(results, loaded, table_console())
    if any(result.verdict == "fail" for result in results):
        raise typer.Exit(1)


@app.command(epilog="Example: `clearhead demo`")
def demo() -> None:
    """Download SmolLM2, continue a sentence and show the model's architecture, in less than two minutes."""
    from clearhead.cli.demo import run

    run(download_bar)


# --- shared parts


def _check_weights(name: str) -> None:
    if name not in WEIGHTS:
        raise unknown_name("weights", name, WEIGHTS)


def load_model(
    name: str, dtype: str | None, device: str | None, weights: str = "full", fast: bool | None = None
) -> "Model":
    """Load a model and show the progress on a terminal."""
    from clearhead.api import load

    with loading_bar(name) as progress:
        return load(name, dtype, device, progress, weights=weights, fast=fast)  # type: ignore[arg-type]


def _load_speculation(name: str, dtype: str | None, device: str | None) -> "Model | str":
    """Return "lookup", or load the draft model of this name."""
    if name == "lookup":
        return name
    try:
        return load_model(name, dtype, device)
    except ClearheadError:
        if get_close_matches(name, ["lookup"]):
            raise unknown_name("speculation", name, ["lookup"]) from None
        raise


def _print_stream(stream: "Stream") -> "Generation":
    """Print a text while it is generated."""
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return stream.generation


def _print_generations(prompt: str, generations: "list[Generation]", as_json: bool) -> None:
    """Print one text, or several with numbers; as JSON one object, or a list of them."""
    if as_json:
        data = [{"prompt": prompt} | asdict(generation) for generation in generations]
        print_json(data[0] if len(data) == 1 else data)
        return
    for number, generation in enumerate(generations, start=1):
        typer.echo(generation.text if len(generations) == 1 else f"[{number}] {generation.text}")


def _warn_about_context(generations: "list[Generation]", context: int) -> None:
    """Print a note if a text is longer than the model's context, or ended because the context is full."""
    if any(generation.num_past_context for generation in generations):
        print_message("note", PAST_CONTEXT.format(context=context))
    elif any(generation.finish_reason == "context" for generation in generations):
        print_message("note", f"the text ends because the model's context of {context:,} tokens is full")
