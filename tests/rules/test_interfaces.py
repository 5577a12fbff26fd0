"""Exported names, commands and options are documented; functions that one module uses begin with an underscore."""

import ast
import inspect
import re
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import typer

import clearhead
from clearhead.cli.app import app
from tests.rules.source import FILES, exported, package_of, shown, tree_of

TESTS = Path(__file__).parents[1]
PACKAGES = [package_of(path) for path in FILES if path.name == "__init__.py" and package_of(path)]
OUTSIDE = [*TESTS.rglob("*.py"), *(TESTS.parent / "benchmarks").glob("*.py")]


def is_from_clearhead(value: object) -> bool:
    return (getattr(value, "__module__", None) or "").startswith("clearhead")


def undocumented(name: str, value: object) -> list[str]:
    """Return the names without a docstring: the function or class itself, and public methods that the class defines."""
    if (
        isinstance(value, ModuleType)
        or not (inspect.isfunction(value) or inspect.isclass(value))
        or not is_from_clearhead(value)
    ):
        return []
    missing = [] if own_docstring(value) else [name]
    if inspect.isclass(value):
        for attribute, member in vars(value).items():
            function = getattr(member, "__func__", member)  # of a class method or a static method
            function = member.fget if isinstance(member, property) else function
            public = not attribute.startswith("_") and inspect.isfunction(function)
            if public and not own_docstring(function) and not inherits_docstring(value, attribute):
                missing.append(f"{name}.{attribute}")
    return missing


def own_docstring(value: object) -> bool:
    text = getattr(value, "__doc__", None)
    return bool(text) and not re.match(r"\w+\(.*\)$", text)  # the default docstring of a dataclass is its signature


def inherits_docstring(owner: type, attribute: str) -> bool:
    return any(getattr(getattr(base, attribute, None), "__doc__", None) for base in owner.__mro__[1:])


def unlisted_modules(init: Path) -> list[str]:
    """Return the modules and subpackages that the docstring of a package does not name. `parts_*` names several."""
    listed = re.findall(r"[\w*]+", ast.get_docstring(tree_of(init)) or "")
    files = [path.stem for path in init.parent.glob("*.py") if path != init]
    packages = [path.parent.name for path in init.parent.glob("*/__init__.py")]
    return sorted(name for name in files + packages if not any(fnmatchcase(name, word) for word in listed))


@pytest.mark.parametrize("package", PACKAGES, ids=".".join)
def test_docstring_of_a_package_lists_its_modules(package):
    assert unlisted_modules(Path(clearhead.__file__).parent.joinpath(*package, "__init__.py")) == []


def test_module_that_no_docstring_names_is_found(tmp_path):
    init = tmp_path / "__init__.py"
    init.write_text('"""Parts: one, rows_*."""')
    for name in ("one", "two", "rows_a"):
        (tmp_path / f"{name}.py").touch()
    assert unlisted_modules(init) == ["two"]


@pytest.mark.parametrize("package", PACKAGES, ids=".".join)
def test_exported_functions_and_classes_have_docstrings(package):
    module = import_module(".".join(("clearhead", *package)))
    missing = {name: undocumented(name, getattr(module, name)) for name in sorted(exported(package))}
    assert {name: names for name, names in missing.items() if names} == {}


def test_the_public_api_has_docstrings():
    missing = {name: undocumented(name, getattr(clearhead, name)) for name in clearhead.__all__}
    assert {name: names for name, names in missing.items() if names} == {}


def test_missing_docstrings_are_detected():
    def bare() -> None: ...

    class Bare:
        """Documented, unlike its method."""

        def method(self) -> None: ...

    bare.__module__ = Bare.__module__ = "clearhead.x"
    assert undocumented("bare", bare) == ["bare"]
    assert undocumented("Bare", Bare) == ["Bare.method"]


def commands(command, path=()):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_and_option_has_help(path):
    command = COMMANDS[path]
    assert command.help
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", None)] == []


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return all names, attributes and words in strings of a file: any of them may be a use."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.update(node.name.split("."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            found.update(re.findall(r"\w+", node.value))
    return frozenset(found)


def functions_of(path: Path) -> list[str]:
    """Return the functions of a module without a decorator. Decorators use functions: for example, commands."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree_of(path).body if isinstance(node, kinds) and not node.decorator_list]


def test_functions_used_in_one_module_only_begin_with_an_underscore():
    num_files = Counter(name for file in (*FILES, *OUTSIDE) for name in names_in(file))
    unused_elsewhere = [
        (shown(path), name)
        for path in FILES
        for name in functions_of(path)
        if not name.startswith("_") and num_files[name] - (name in names_in(path)) == 0
    ]
    assert unused_elsewhere == []
