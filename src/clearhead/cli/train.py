"""Define the command that trains: train.

clearhead train capitals --out runs/capitals --train.steps 1000
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from clearhead.cli.app import JsonOption, UsageError, app, echo, errors, print_json, table_console
from clearhead.cli.threads import takes_threads

if TYPE_CHECKING:
    from clearhead.training import ResolvedRecipe


def _print_recipes(as_json: bool) -> None:
    """Print the name and description of every recipe that comes with Clearhead."""
    from clearhead.training import available_recipes, describe_recipe

    recipes = available_recipes()
    if as_json:
        rows = [{"name": name, "path": str(path), "about": describe_recipe(path)} for name, path in recipes.items()]
        print_json(rows)
        return
    for name, path in recipes.items():
        echo("\n    ".join([name, *describe_recipe(path)]))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    epilog="Example: `clearhead train capitals --out runs/capitals --train.steps 1000`",
)
@takes_threads
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="Name of a recipe (see --list), or a TOML file.", metavar="RECIPE")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. An interrupted run in this folder is resumed.")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a very small version of the recipe, to check that it works.")
    ] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Print all recipes and exit.")] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every value of the recipe and where it comes from, and exit.")
    ] = False,
    as_json: JsonOption = False,
    show_help: Annotated[
        bool, typer.Option("--help", help="Show this message; after the name of a recipe, also its keys.")
    ] = False,
) -> None:
    """Train a model from a recipe. Any value of the recipe can be changed: --train.steps 100 --model.width 64.

    `clearhead train capitals --help` lists all keys of the recipe capitals.
    """
    if show_help:
        _print_help(context, recipe, smoke)
        return
    if list_recipes:
        _print_recipes(as_json)
        return
    if recipe is None:
        raise UsageError(
            "train needs a recipe, such as `clearhead train capitals --out runs/capitals`; --list shows all"
        )
    from clearhead.training import find_recipe, parse_overrides

    path = find_recipe(recipe)  # wrong names are answered before torch is imported
    parse_overrides(context.args)
    if out is None and not print_config:
        raise UsageError(f"train needs a folder for the run; add --out runs/{path.stem}")
    from clearhead.training import is_main_process, read_recipe
    from clearhead.training import train as run

    resolved = read_recipe(recipe, context.args, smoke)
    if print_config:
        _print_config(resolved, as_json)
        return
    assert out is not None
    result = run(resolved, out, errors)
    if not is_main_process():
        return
    if as_json:
        print_json(asdict(result) | {"folder": str(result.folder)})
    else:
        echo(str(result.folder / "model"))


def _print_config(resolved: "ResolvedRecipe", as_json: bool) -> None:
    if as_json:
        from clearhead.config import to_dict

        print_json({"recipe": to_dict(resolved.recipe), "origins": resolved.origins})
        return
    for line in resolved.describe():
        echo(line)


def _print_help(context: typer.Context, recipe: str | None, smoke: bool) -> None:
    """Print the help of the command and, after the name of a recipe, its keys with types and values."""
    typer.echo(context.get_help())
    if recipe is None:
        return
    from clearhead.training import find_recipe

    find_recipe(recipe)
    from rich.table import Table

    from clearhead.training import read_recipe, recipe_keys

    keys = recipe_keys(read_recipe(recipe, context.args, smoke))
    echo(f"Keys of {recipe}: change one with --KEY VALUE")
    table = Table("key", "value", "type: meaning", box=None)
    table.columns[0].no_wrap = True
    for key in keys:
        value = key.value if key.origin == "recipe" else f"{key.value} ({key.origin})"
        table.add_row(f"--{key.name}", escape(value), escape(f"{key.type}: {key.about}" if key.about else key.type))
    table_console().print(table)
