"""The command that trains: train.

clearhead train capitals --out runs/capitals --train.steps 1000
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, UsageError, app, errors, print_json


def print_recipes(as_json: bool) -> None:
    from clearhead.training import heading, shelf

    if as_json:
        print_json([{"name": name, "path": str(path), "about": heading(path)} for name, path in shelf().items()])
        return
    for name, path in shelf().items():
        typer.echo("\n    ".join([name, *heading(path)]))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: `clearhead train capitals --out runs/capitals --train.steps 1000`",
)
def train(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="The name of a recipe (see --list), or a TOML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the run; an interrupted run there goes on.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A very small version of it, to see that it runs.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Print the recipes and leave.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model by a recipe. Any value of it can be changed: --train.steps 100 --model.width 64."""
    if listed:
        print_recipes(as_json)
        return
    if recipe is None or out is None:
        raise UsageError("train needs a recipe and --out FOLDER; --list shows the recipes")
    from clearhead.training import is_first_process, read_recipe
    from clearhead.training import train as run

    resolved = read_recipe(recipe, context.args, smoke)
    trained = run(resolved.recipe, out, errors, "\n".join(resolved.lines()))
    if not is_first_process():
        return
    if as_json:
        print_json(asdict(trained) | {"folder": str(trained.folder)})
    else:
        typer.echo(str(trained.folder / "model"))
