"""Define the command that trains: train.

clearhead train capitals --out runs/capitals --train.steps 1000
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, UsageError, app, errors, print_json


def _print_recipes(as_json: bool) -> None:
    """Print the name and description of every recipe that comes with Clearhead."""
    from clearhead.training import available_recipes, describe_recipe

    recipes = available_recipes()
    if as_json:
        rows = [{"name": name, "path": str(path), "about": describe_recipe(path)} for name, path in recipes.items()]
        print_json(rows)
        return
    for name, path in recipes.items():
        typer.echo("\n    ".join([name, *describe_recipe(path)]))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: `clearhead train capitals --out runs/capitals --train.steps 1000`",
)
def train(
    context: typer.Context,
    recipe: Annotated[str | None, typer.Argument(help="Name of a recipe (see --list), or a TOML file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. An interrupted run in this folder is resumed.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a very small version of the recipe, to check that it works.")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Print all recipes and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model from a recipe. Any value of the recipe can be changed: --train.steps 100 --model.width 64."""
    if list_recipes:
        _print_recipes(as_json)
        return
    if recipe is None or out is None:
        raise UsageError("train needs a recipe and --out FOLDER; --list shows the recipes")
    from clearhead.training import is_main_process, read_recipe
    from clearhead.training import train as run

    resolved = read_recipe(recipe, context.args, smoke)
    result = run(resolved.recipe, out, errors, opening="\n".join(resolved.describe()))
    if not is_main_process():
        return
    if as_json:
        print_json(asdict(result) | {"folder": str(result.folder)})
    else:
        typer.echo(str(result.folder / "model"))
