"""Find the recipes that come with Clearhead by name.

path = find_recipe("capitals"); read_recipe(path, ["--train.steps", "100"])
"""

from itertools import takewhile
from pathlib import Path

from clearhead.errors import ClearheadError, unknown_name

# A wheel contains configs/ inside the package (pyproject.toml); in a checkout it is next to src/.
RECIPE_FOLDERS = tuple(Path(__file__).parents[up] / "configs" for up in (1, 3))


def available_recipes() -> dict[str, Path]:
    """Return the names and files of all recipes that come with Clearhead."""
    return {path.stem: path for folder in RECIPE_FOLDERS for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe, given its name or a path. Raise ClearheadError if there is none."""
    path = available_recipes().get(str(name), Path(name))
    if path.is_file():
        return path
    if path.suffix == ".toml":
        raise ClearheadError(
            f"the recipe {str(name)!r} does not exist; `clearhead train --list` shows all named recipes"
        )
    raise unknown_name("recipe", str(name), available_recipes())


def describe_recipe(recipe: Path) -> list[str]:
    """Return the lines of the comment at the top of a recipe: what it trains and how to run it."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
