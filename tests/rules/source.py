"""The source files of the package and their imports, for the tests in this folder."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import clearhead

ROOT = Path(clearhead.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


@dataclass(frozen=True)
class Import:
    """One name that a file imports from another part of the package."""

    file: Path
    line: int
    module: tuple[str, ...]  # ("cache", "page_pool") for clearhead.cache.page_pool
    name: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.name} from clearhead.{'.'.join(self.module)}"


def shown(path: Path) -> str:
    """Return a file as the messages of the tests name it."""
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts[:-1]


def top_level(path: Path) -> str:
    """Return the package or module directly below clearhead that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def is_package(module: tuple[str, ...]) -> bool:
    return ROOT.joinpath(*module, "__init__.py").is_file()


def imports_of(path: Path) -> Iterator[Import]:
    """Yield every import from clearhead, also those inside functions."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("clearhead."):
                    *module, name = alias.name.split(".")[1:]
                    yield Import(path, node.lineno, tuple(module), name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "clearhead":
            module = tuple((node.module or "").split(".")[1:])
            for alias in node.names:
                yield Import(path, node.lineno, module, alias.name)


@cache
def exported(package: tuple[str, ...]) -> frozenset[str]:
    """Return the names in `__all__` of a package, read without importing it."""
    for node in tree_of(ROOT.joinpath(*package, "__init__.py")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
