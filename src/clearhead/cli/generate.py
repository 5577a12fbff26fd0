"""Commands that make text, and the proof that they make it right: generate, chat, verify, demo.

clearhead generate smollm2 "The capital of France is"
"""

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, ModelArgument, app, download_bar, errors, loading_bar, print_json


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
