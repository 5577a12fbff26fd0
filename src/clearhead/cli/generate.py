"""The commands generate, chat, verify and demo.

clearhead generate smollm2 "The capital of France is"
"""

from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import texts
from clearhead.cli.app import (
    JsonOption,
    ModelArgument,
    app,
    download_bar,
    loading_bar,
    print_json,
    print_message,
    step_bar,
    table_console,
)
from clearhead.cli.checks import check_files, check_model, check_model_options
from clearhead.cli.sampling import check_search, given_options, takes_sampling
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError, unknown_name
from clearhead.options import (
    CHAT_DEFAULTS,
    BeamOptions,
    SamplingOptions,
    check_positive_integer,
    check_temperature_is_set,
    description_of,
    option_fields,
)
from clearhead.tokenization import read_conversation

if TYPE_CHECKING:
    from clearhead.api import Model

DtypeOption = Annotated[
    str | None,
    typer.Option(help="Precision: float32, bfloat16, float16 or float64; by default that of the model's file."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Device to run on: cpu, cuda, cuda:1 for the second GPU, mps or xpu; by default cpu.")
]
WeightsOption = Annotated[
    str,
    typer.Option(
        help="Format of the weights: full (in --dtype, also if the file is quantized), int8 or int4 (quantized on "
        "loading), or stored (as in the .gguf file or quantized folder). All but full compute in bfloat16 unless "
        "--dtype is given.",
        rich_help_panel="Speed",
    ),
]
FastOption = Annotated[
    bool | None,
    typer.Option(
        "--fast/--no-fast",
        help="--fast uses the C++ kernels on a CPU, and waits until they are compiled; --no-fast uses PyTorch. By "
        "default they are compiled in the background if they are missing, and used once they are ready.",
        rich_help_panel="Speed",
    ),
]
_SEARCH = {"rich_help_panel": "Search"}
_BEAM_DESCRIPTIONS = {each.name: description_of(each) for each in option_fields(BeamOptions)}


@app.command(
    epilog='Examples: `clearhead generate smollm2 "What is the capital of France?"`, '
    '`clearhead generate smollm2 "The capital of France is" --raw --max-new-tokens 20`'
)
@takes_threads
@takes_sampling(SamplingOptions())
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str,
        typer.Argument(
            help="The text to answer, continue or translate; - reads it from standard input.", metavar="PROMPT"
        ),
    ],
    sampling: dict[str, Any],
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text, even if the model has a chat template to answer with.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message: instructions for the answer, for models with a chat template.")
    ] = None,
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
            help="Speculative decoding: `lookup` drafts tokens by copying from the text itself; the name of a smaller "
            "model with the same vocabulary drafts with that model.",
            **_SEARCH,
        ),
    ] = None,
    source_language: Annotated[
        str | None,
        typer.Option(help="Language of the prompt, such as eng_Latn, for models with language tokens (NLLB, mBART)."),
    ] = None,
    target_language: Annotated[
        str | None, typer.Option(help="Language to translate to, such as fra_Latn, for models with language tokens.")
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
    """Answer a question, continue a text or translate it, and print the result while it is generated.

    A model with a chat template answers the prompt; --raw continues it instead. A model without one continues the
    prompt, and an encoder-decoder translates it. On a terminal, a prompt that is continued is shown dim.
    """
    check_model_options(model, dtype, device, weights)
    if speculate not in (None, "lookup"):
        _check_speculation(speculate)
    check_search(sampling, n, beams, length_penalty)
    if logprobs is not None and not as_json:
        raise ClearheadError("--logprobs needs --json, which prints the log-probabilities; add --json")
    if raw and system is not None:
        raise ClearheadError("--system is part of the chat template, which --raw leaves out; give only one of them")
    from clearhead.api import RecurrentBaseline

    text = texts.typed_text(prompt)
    loaded = load_model(model, dtype, device, weights, fast)
    languages = given_options(source_language=source_language, target_language=target_language)
    options = sampling | languages | given_options(beams=beams, length_penalty=length_penalty, logprobs=logprobs)
    if speculate is not None:
        options["speculate"] = _load_speculation(speculate, dtype, device)
    prepared = texts.prepare_prompt(loaded, text, raw, system)
    if beams is None and n == 1 and not as_json and not languages and not isinstance(loaded, RecurrentBaseline):
        generations = [texts.print_stream(prepared, loaded.stream(prepared.input, **options))]
    else:
        generations = loaded.generate_many([prepared.input], n, **options)
        (texts.print_generations_as_json if as_json else texts.print_generations)(prepared, generations)
    texts.print_notes(loaded, prepared, generations)


@app.command(epilog="Example: `clearhead chat smollm2`")
@takes_threads
@takes_sampling(CHAT_DEFAULTS)
def chat(
    model: ModelArgument,
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="System message: instructions for the whole conversation.")] = None,
    load: Annotated[
        Path | None, typer.Option(help="Continue the conversation in this file, which /save wrote.")
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    weights: WeightsOption = "full",
    fast: FastOption = None,
) -> None:
    """Chat with a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D quits.

    Pasted lines stay one message, and Alt-Enter starts a new line. The commands change the system message and the
    sampling options, take back or repeat a turn, and save and load the conversation. In a pipe, each line is a message.
    """
    check_model_options(model, dtype, device, weights)
    check_temperature_is_set(sampling)
    check_files([load])
    if load is not None:
        read_conversation(load)  # a wrong file is answered before the model is loaded
    loaded = load_model(model, dtype, device, weights, fast)
    from clearhead.cli.chat_commands import run_chat

    conversation = loaded.chat(None if load is not None else system)
    if load is not None:
        conversation.load(load)
        conversation.system = conversation.system if system is None else system
    run_chat(conversation, sampling, load)


@app.command(epilog="Example: `clearhead verify smollm2 --new-tokens 64`")
@takes_threads
def verify(
    model: ModelArgument,
    new_tokens: Annotated[
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
        str,
        typer.Option(help="Precision: float32, float64, bfloat16 or float16; bfloat16 and float16 hide small errors."),
    ] = "float32",
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Verify on your model that no optimization changes what it computes.

    The reference is a plain forward pass: one text, read at once, without a cache. Each check computes the same logits
    in another way (caches, batches, padding, chunked prefill, greedy and speculative decoding, fused attention, C++
    kernels) and prints the largest difference and its tolerance. If all pass, generation gives what the plain network
    gives, up to rounding. Packed weights are compared within the error of their format. If transformers is installed,
    its logits are compared too.

    The checks do not prove that the weights are good. Only the comparison with transformers shows whether the
    reference is right. Ctrl-C prints the checks that have run. The exit code is 1 if a check fails.
    """
    check_model_options(model, dtype, device)
    for name, number in (("new_tokens", new_tokens), ("length", length)):
        if number is not None:
            check_positive_integer(name, number)
    from clearhead.verification import print_results
    from clearhead.verification import verify as run_checks

    loaded = load_model(model, dtype, device, fast=False)
    results = []
    stopped = False
    with step_bar("checking") as progress:
        try:
            for result in run_checks(
                loaded, length=length, num_new_tokens=new_tokens, compiles=compiles, progress=progress
            ):
                results.append(result)
        except KeyboardInterrupt:
            stopped = True
    if as_json:
        print_json([result.as_data() for result in results])
    else:
        print_results(results, loaded, table_console())
    if stopped:
        print_message("note", f"stopped after {len(results)} of {progress.total} checks; the others have not run")
    if any(result.verdict == "fail" for result in results):
        raise typer.Exit(1)
    if stopped:
        raise typer.Exit(130)


@app.command(epilog="Example: `clearhead demo`")
def demo() -> None:
    """Download SmolLM2, let it answer a question, and show its architecture, in less than two minutes."""
    from clearhead.cli.demo import run

    run(download_bar)


# --- shared parts


def load_model(
    name: str, dtype: str | None, device: str | None, weights: str = "full", fast: bool | None = None
) -> "Model":
    """Load a model and show the progress on a terminal. The arguments are checked before torch is imported."""
    check_model_options(name, dtype, device, weights)
    with loading_bar(name) as progress:
        from clearhead.api import load  # importing torch takes seconds, in which the bar is shown

        return load(name, dtype, device, progress, weights=weights, fast=fast)  # type: ignore[arg-type]


def _load_speculation(name: str, dtype: str | None, device: str | None) -> "Model | str":
    """Return "lookup", or load the draft model of this name."""
    return name if name == "lookup" else load_model(name, dtype, device)


def _check_speculation(name: str) -> None:
    """Raise ClearheadError unless this is a model."""
    try:
        check_model(name)
    except ClearheadError:
        if get_close_matches(name, ["lookup"]):
            raise unknown_name("speculation", name, ["lookup"]) from None
        raise
