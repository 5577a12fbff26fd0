"""Commands that look inside: trace, book.

clearhead trace smollm2 "The cat sat on the mat" --layer 3 --head 0
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, ModelArgument, OverwriteOption, app, check_absent, loading_bar, print_json


@app.command(epilog='Example: `clearhead trace smollm2 "The cat sat on the mat" --lens --out page.html`')
def trace(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(help="What the model reads; - reads it from standard input.")],
    source: Annotated[str | None, typer.Option(help="What an encoder-decoder answers; TEXT is its answer.")] = None,
    layer: Annotated[int | None, typer.Option(help="From 0, or from the end as -1; the last otherwise.")] = None,
    head: Annotated[int | None, typer.Option(help="From 0; all of the layer otherwise.")] = None,
    lens: Annotated[bool, typer.Option("--lens", help="Also what each layer would say next.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="A file to write: .html (every head), .png, .safetensors (all numbers).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, bfloat16, float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps.")] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """See where a model looks: as a heatmap in the terminal, a page with every head, a picture, or numbers."""
    from rich.console import Console

    from clearhead.api import load
    from clearhead.inspection import HeadSelection, Lens, output

    chosen = HeadSelection(layer, head)
    if out is not None:
        output.check_path(out, chosen, lens)
        check_absent(out, overwrite, "name")
    read = sys.stdin.read() if text == "-" else text
    with loading_bar(model) as progress:
        loaded = load(model, dtype=dtype, device=device, progress=progress)
    traced = loaded.trace(read, source)
    readings = Lens.of(traced, loaded.tokenizer, output.lens_length(out)) if lens else None
    if out is not None:
        output.write(traced, out, chosen, readings)
    if as_json:
        print_json(output.as_data(traced, chosen, readings))
    elif out is not None:
        typer.echo(str(out))
    else:
        console = Console()
        output.print_heatmap(traced, chosen, console)
        if readings is not None:
            output.print_lens(readings, console)


@app.command(epilog="Example: `clearhead book --out book.html`")
def book(
    out: Annotated[Path | None, typer.Option(help="An .html file to write; nothing: print it here.")] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Work out attention, masks, positions and the cache on small numbers, computed as you watch."""
    from rich.console import Console

    from clearhead.files import check_output, write_text
    from clearhead.inspection import book_data, book_page, print_book

    if out is not None:
        check_output(out, [".html"])
        check_absent(out, overwrite, "name")
        write_text(out, book_page())
    if as_json:
        print_json(book_data())
    elif out is not None:
        typer.echo(str(out))
    else:
        print_book(Console())
