"""The recipes that come with Clearhead, by name.

path = find_recipe("capitals"); read_recipe(path, ["--train.steps", "100"])
"""

from itertools import takewhile
from pathlib import Path

from clearhead.errors import ClearheadError, unknown_name

# A wheel carries configs/ inside the package (pyproject.toml); in a checkout it stands beside src/.
HOMES = tuple(Path(__file__).parents[up] / "configs" for up in (1, 3))


def shelf() -> dict[str, Path]:
    return {path.stem: path for home in HOMES for path in sorted(home.glob("*.toml"))}


def find_recipe(name: str | Path) -> Path:
    """A name of the shelf, or a TOML file."""
    path = shelf().get(str(name), Path(name))
    if path.is_file():
        return path
    if path.suffix == ".toml":
        raise ClearheadError(f"there is no recipe {str(name)!r}; `clearhead train --list` shows those that have a name")
    raise unknown_name("recipe", str(name), shelf())


def heading(recipe: Path) -> list[str]:
    """What it trains and how it is run: the comment at its top."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
