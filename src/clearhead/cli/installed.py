"""Commands about the models that are on this machine: list, info, remove.

clearhead list
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from clearhead.cli.app import JsonOption, app, echo, format_bytes, print_json, table_console
from clearhead.cli.checks import check_model

if TYPE_CHECKING:
    from clearhead.catalog import CatalogEntry

_NameArgument = Annotated[str, typer.Argument(help="Name of an installed model or data set.", metavar="NAME")]


@app.command("list", epilog="Example: `clearhead list --json`")
def list_models(as_json: JsonOption = False) -> None:
    """List what is installed, with sizes on disk, and what `clearhead get` offers."""
    from clearhead.catalog import list_entries

    entries = list_entries()
    if as_json:
        print_json([_entry_data(entry) for entry in entries])
        return
    installed = [entry for entry in entries if entry.path is not None]
    offered = [entry for entry in entries if entry.path is None]
    table = Table("name", "size", "", box=None, title_justify="left", pad_edge=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    table.columns[1].justify = "right"
    _add_rows(table, "installed (size on disk)", [(entry, entry.disk_bytes) for entry in installed])
    if offered:
        _add_rows(table, "clearhead get NAME (download)", [(entry, entry.download_bytes) for entry in offered])
    table_console().print(table)


def _add_rows(table: Table, heading: str, rows: "list[tuple[CatalogEntry, int]]") -> None:
    table.add_row(Text(heading, style="bold"))
    for entry, num_bytes in rows:
        table.add_row(entry.name, format_bytes(num_bytes), Text(entry.description))


@app.command(epilog="Examples: `clearhead info smollm2`, `clearhead info my-folder --json`")
def info(
    name: Annotated[
        str, typer.Argument(help="A name that `clearhead list` shows, a model folder or a .gguf file.", metavar="NAME")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show where a model comes from, its license, size and architecture, and whether it has a chat template."""
    data = _path_data(Path(name)) if Path(name).exists() else _catalog_data(name)
    path = data["path"]
    if path is not None and data["kind"] == "model":
        data |= _model_data(Path(path))
    if as_json:
        print_json(data)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    lines = _describe(data)
    for label, text in lines.items():
        table.add_row(label, Text(text))  # a text may look like markup
    console = table_console()
    console.print(table)
    if path is not None:  # whole, so that it can be copied from a narrow terminal
        console.print(f"{'path':{max(map(len, lines))}}  {path}", markup=False, soft_wrap=True)


@app.command(epilog="Example: `clearhead remove smollm2`")
def remove(name: _NameArgument, as_json: JsonOption = False) -> None:
    """Delete a model or data set that `clearhead get` installed. `clearhead get` fetches it again."""
    from clearhead.catalog import remove as remove_installed

    removed = remove_installed(name)
    if as_json:
        print_json({"name": removed.name, "bytes": removed.disk_bytes})
    else:
        echo(f"removed {removed.name} ({format_bytes(removed.disk_bytes)})")


# --- data and how it is printed


def _entry_data(entry: "CatalogEntry") -> dict[str, Any]:
    return asdict(entry) | {
        "path": None if entry.path is None else str(entry.path),
        "installed": entry.path is not None,
    }


def _catalog_data(name: str) -> dict[str, Any]:
    from clearhead.catalog import describe_entry, model_names
    from clearhead.families import presets

    if name in presets() and name not in model_names():
        check_model(name)  # raises ClearheadError, which says what a preset is
    return _entry_data(describe_entry(name))


def _path_data(path: Path) -> dict[str, Any]:
    """Return the same data for a model that is not in the catalog; its license and source are unknown."""
    check_model(str(path))
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {
        "name": path.name,
        "kind": "model",
        **dict.fromkeys(("description", "source", "license", "download_bytes")),
        "disk_bytes": sum(file.stat().st_size for file in files),
        "path": str(path),
        "installed": True,
    }


def _model_data(path: Path) -> dict[str, Any]:
    """Return the architecture of an installed model, from its config."""
    from clearhead.catalog import has_chat_template
    from clearhead.checkpoint import read_config
    from clearhead.summary import summarize

    summary = summarize(read_config(path))
    sizes = ("kind", "parameters", "width", "context", "vocab_size")
    num_layers = sum(len(group.numbers) for group in summary.layers)
    architecture = {name: getattr(summary, name) for name in sizes} | {"num_layers": num_layers}
    return {"architecture": architecture, "chat_template": has_chat_template(path)}


def _describe(data: dict[str, Any]) -> dict[str, str]:
    """Return label and text of each line."""
    lines = {"name": data["name"]}
    lines |= {label: data[label] for label in ("description", "source", "license") if data[label]}
    if data.get("download_bytes"):
        lines["download"] = format_bytes(data["download_bytes"])
    lines["on disk"] = format_bytes(data["disk_bytes"]) if data["installed"] else "not installed"
    if architecture := data.get("architecture"):
        sizes = f"{architecture['num_layers']} layers of width {architecture['width']:,}"
        lines["architecture"] = f"{architecture['kind']}, {sizes}"
        lines["parameters"] = f"{architecture['parameters']:,}"
        lines["context"] = f"{architecture['context']:,} tokens"
        lines["vocabulary"] = f"{architecture['vocab_size']:,} tokens"
        lines["chat template"] = "yes" if data["chat_template"] else "no"
    if not data["installed"]:
        lines["install"] = f"clearhead get {data['name']}"
    return lines
