"""Command that runs experiments on the claims of the book: study.

clearhead study mask
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from clearhead.cli.app import (
    JsonOption,
    OverwriteOption,
    app,
    check_absent,
    echo,
    print_json,
    print_message,
    step_bar,
    table_console,
)
from clearhead.cli.checks import check_installed
from clearhead.cli.threads import takes_threads

if TYPE_CHECKING:
    from clearhead.studies import StudyResult


@app.command(epilog="Examples: `clearhead study mask`, `clearhead study all --out site`")
# Threads wait for each other on a busy machine: mask took 41 s of processor time on one and 109 s on two.
@partial(takes_threads, default=1)
def study(
    name: Annotated[
        str | None, typer.Argument(help="A study, or all; without it, list all studies.", metavar="NAME")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; by default studies/NAME, and studies for all.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first of the three seeds.")] = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run a very small version, to check that it works.")] = False,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Test a claim about Transformers on small networks, and write a picture, a table and a page about it.

    A study runs with three seeds and takes up to two minutes on one CPU core. It writes picture.png, table.json and
    index.html, and prints its verdict in one line.
    """
    from clearhead.studies import ENTRIES, load_study

    if name is None:
        _print_studies(as_json)
        return
    names = list(ENTRIES) if name == "all" else [name]
    if name not in (*ENTRIES, "all"):
        load_study(name)  # raises ClearheadError
    folder = out or (Path("studies") if name == "all" else Path("studies") / name)
    check_absent(folder, overwrite)
    check_installed(["matplotlib"], "the picture of a study", "plot")
    from clearhead.studies import write_site

    results = []
    for each in names:
        results.append(_run(each, folder / each if name == "all" else folder, seed, smoke))
        if not as_json:
            echo(results[-1].verdict)
    if name == "all":
        write_site(results, folder)
    if as_json:
        data = [result.to_dict() for result in results]
        print_json(data if name == "all" else data[0])
    print_message("note", f"open {(folder / 'index.html').resolve().as_uri()} in a browser")


def _run(name: str, folder: Path, seed: int, smoke: bool) -> "StudyResult":
    """Run one study and write its files."""
    from clearhead.studies import load_study, run_study, write_result

    with step_bar("studying") as progress:
        result = run_study(load_study(name), first_seed=seed, smoke=smoke, progress=progress)
    write_result(result, folder)
    return result


def _print_studies(as_json: bool) -> None:
    """Print name, title and statements of every study."""
    from clearhead.studies import ENTRIES

    if as_json:
        entries = ENTRIES.values()
        print_json([{"name": each.name, "title": each.title, "statements": list(each.statements)} for each in entries])
        return
    table = Table("study", "title", "statements of docs/book.md", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for entry in ENTRIES.values():
        table.add_row(entry.name, entry.title, ", ".join(entry.statements))
    table_console().print(table)
