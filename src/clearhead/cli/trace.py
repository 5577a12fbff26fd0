"""Commands that look inside a model: trace, book.

clearhead trace smollm2 "The cat sat on the mat" --layer 3 --head 0
"""

from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import (
    JsonOption,
    ModelArgument,
    OverwriteOption,
    app,
    check_absent,
    echo,
    format_bytes,
    print_json,
)
from clearhead.cli.checks import check_installed, check_layer, check_model_options
from clearhead.cli.generate import DeviceOption, load_model
from clearhead.cli.texts import typed_text
from clearhead.cli.threads import takes_threads
from clearhead.files import check_output_path
from clearhead.terminal import TerminalConsole


@app.command(epilog='Example: `clearhead trace smollm2 "The cat sat on the mat" --lens --out page.html`')
@takes_threads
def trace(
    model: ModelArgument,
    text: Annotated[str, typer.Argument(help="The text to read; - reads it from standard input.", metavar="TEXT")],
    source: Annotated[
        str | None, typer.Option(help="Input of the encoder of an encoder-decoder; TEXT is the input of its decoder.")
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Layer to show, from 0, or from the end if negative; by default the last, and in a page the "
            "one with the most specific head."
        ),
    ] = None,
    head: Annotated[int | None, typer.Option(help="Head to show, from 0; by default all heads of the layer.")] = None,
    lens: Annotated[
        bool, typer.Option("--lens", help="Also show the logit lens: the next token that each layer would predict.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Output file: .html (every head), .png, or .safetensors (all numbers).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Precision: float32, float64, bfloat16 or float16.")] = "float32",
    device: DeviceOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which tokens a model attends to.

    Print a heatmap of the attention weights, averaged over heads unless --head is given. With --out, write an HTML page
    with every head, a PNG picture, or a safetensors file with all numbers instead. Without --layer and --head, the page
    opens on the head whose attention is most specific, and says why.
    """
    check_layer(check_model_options(model, dtype, device), layer, head)
    if out is not None:
        check_output_path(out, [".html", ".png", ".safetensors"])
        check_absent(out, overwrite, "name")
        if out.suffix.lower() == ".png":
            check_installed(["matplotlib"], "a PNG", "plot")
    from clearhead.inspection import (
        HeadSelection,
        check_export_path,
        export_trace,
        make_lens_table,
        num_lens_tokens,
        print_heatmap,
        print_lens,
        trace_data,
    )

    selection = HeadSelection(layer, head)
    if out is not None:
        check_export_path(out, selection, lens)
    text = typed_text(text)
    loaded = load_model(model, dtype, device)
    traced = loaded.trace(text, source)
    lens_table = make_lens_table(traced, loaded.tokenizer, num_lens_tokens(out)) if lens else None
    if out is not None:
        export_trace(traced, out, selection, lens_table, model)
    if as_json:
        print_json(trace_data(traced, selection, lens_table))
    elif out is not None:
        echo(_describe_file(out))
    else:
        console = TerminalConsole()
        print_heatmap(traced, selection, console)
        if lens_table is not None:
            print_lens(lens_table, console)


@app.command(epilog="Example: `clearhead book --out course.html`")
def book(
    out: Annotated[Path | None, typer.Option(help="HTML file to write; by default the examples are printed.")] = None,
    studies: Annotated[
        Path | None, typer.Option(help="Folder of `clearhead study all`, whose pictures the page shows.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Teach the Transformer from attention to its cost, with worked numbers.

    With --out, write a course as one HTML page: every statement with its formula, numbers, questions and sliders.
    Otherwise print the worked examples.
    """
    if studies is not None and out is None:
        raise typer.BadParameter("only the page shows studies; add --out course.html", param_hint="--studies")
    if out is not None:
        check_output_path(out, [".html"])
        check_absent(out, overwrite, "name")
    from clearhead.course import book_data, book_page, print_book
    from clearhead.files import write_text

    if out is not None:
        write_text(out, book_page(studies))
    if as_json:
        print_json(book_data())
    elif out is not None:
        echo(_describe_file(out))
    else:
        print_book(TerminalConsole())


def _describe_file(path: Path) -> str:
    """Return the name of a written file, its size, and for a page its address."""
    address = f"; open {path.resolve().as_uri()} in a browser" if path.suffix.lower() == ".html" else ""
    return f"{path}: {format_bytes(path.stat().st_size)}{address}"
