"""The command that trains: train.

clearhead train configs/capitals.toml --out runs/capitals --train.steps 1000
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from clearhead.cli.app import JsonOption, app, errors, print_json


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: `clearhead train configs/capitals.toml --out runs/capitals --train.steps 1000`",
)
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A TOML file, as those in configs/.")],
    out: Annotated[Path, typer.Option(help="The folder of the run; an interrupted run there goes on.")],
    smoke: Annotated[bool, typer.Option("--smoke", help="A very small version of it, to see that it runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model by a recipe. Any value of it can be changed: --train.steps 100 --model.width 64."""
    from clearhead.training.loop import train as run
    from clearhead.training.recipe import read_recipe

    resolved = read_recipe(recipe, context.args, smoke)
    for line in resolved.lines():
        errors.print(line, markup=False, soft_wrap=True, style="dim")
    trained = run(resolved.recipe, out, errors)
    if as_json:
        print_json(asdict(trained) | {"folder": str(trained.folder)})
    else:
        typer.echo(str(trained.folder / "model"))
