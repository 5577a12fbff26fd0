"""Packages are imported through their `__init__`, and their imports form no cycle."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.rules.source import FILES, ROOT, Import, exported, imports_of, is_package, package_of, top_level

# Modules without dependencies that any package may import.
BASICS = {"config", "errors", "files", "home", "lazy_imports", "tensor_files", "terminal", "threads"}

# What each package or module may import, besides itself and the basics. docs/architecture.md has the same table.
ALLOWED_IMPORTS = {
    "architecture": set(),
    "model": {"architecture"},
    "families": {"architecture"},
    "tokenization": set(),
    "catalog": set(),
    "options": set(),
    "cache": {"architecture", "model"},
    "backends": {"architecture", "cache", "model", "options"},
    "checkpoint": {"architecture", "backends", "catalog", "families", "model", "tokenization"},
    "sampling": {"options"},
    "engine": {"architecture", "backends", "cache", "model", "options", "sampling"},
    "generation": {"architecture", "backends", "cache", "engine", "model", "options", "sampling", "tokenization"},
    "inspection": {"architecture", "data", "generation", "model", "options", "tokenization"},
    "api": {
        *("architecture", "audio", "backends", "cache", "checkpoint", "costs", "engine", "families", "generation"),
        *("inspection", "model", "options", "summary", "tokenization", "transcription"),
    },
    "transcription": {
        *("architecture", "audio", "cache", "checkpoint", "generation", "model", "options", "sampling"),
    },
    "audio": set(),
    "summary": {"architecture", "costs"},
    "costs": {"architecture", "backends", "cache", "model"},
    "data": {"tokenization"},
    "evaluation": {
        *("api", "architecture", "cache", "data", "engine", "generation", "model", "options", "sampling"),
        "tokenization",
    },
    "verification": {"api", "architecture", "backends", "cache", "engine", "generation", "model", "options"},
    "parallel": {"architecture", "costs", "engine", "model"},
    "training": {
        *("api", "architecture", "backends", "catalog", "checkpoint", "costs", "data", "families", "model"),
        *("parallel", "tokenization"),
    },
    "benchmark": {"api", "architecture", "backends", "cache", "checkpoint", "engine", "generation", "model", "options"},
    "server": {
        *("api", "architecture", "backends", "costs", "engine", "generation", "inspection", "options"),
        *("parallel", "tokenization"),
    },
    "cli": {
        *("api", "architecture", "benchmark", "catalog", "checkpoint", "costs", "course", "data", "evaluation"),
        *(
            "families",
            "generation",
            "inspection",
            "options",
            "parallel",
            "server",
            "studies",
            "summary",
            "tokenization",
            "training",
            "verification",
        ),
    },
    "studies": {
        *("api", "architecture", "cache", "costs", "data", "families", "inspection", "model", "training"),
    },
    "course": {"api", "architecture", "cache", "costs", "data", "families", "inspection", "model", "studies"},
    **{name: set() for name in BASICS},
}


def target_of(statement: Import) -> str:
    """Return the package or module directly below clearhead that is imported."""
    return statement.module[0] if statement.module else statement.name


def private_import(statement: Import, package: tuple[str, ...]) -> str | None:
    """Return an error message if a file of `package` imports a private module or name, else None."""
    module = statement.module
    if not module:  # from clearhead import name
        return None
    owner = module if is_package(module) else module[:-1]
    if package[: len(owner)] == owner:  # the file's own package, or one around it
        return None
    if not is_package(module) and len(module) > 1:
        return f"{statement}: import it from clearhead.{'.'.join(owner)}"
    if is_package(module) and statement.name not in exported(module):
        return f"{statement}: {statement.name} is not in its __all__"
    return None


def test_other_packages_are_imported_through_their_init():
    messages = [private_import(statement, package_of(path)) for path in FILES for statement in imports_of(path)]
    assert [message for message in messages if message] == []
    assert len(messages) > 1000


@pytest.mark.parametrize(
    ("module", "name", "package", "is_private"),
    [
        (("cache", "page_pool"), "PagePool", ("generation",), True),
        (("cache",), "KeyValueCache", ("generation",), False),
        (("cache",), "not_exported", ("generation",), True),
        (("cache", "page_pool"), "PagePool", ("cache",), False),
        (("backends", "capability"), "anything", ("backends", "cpu"), False),
        (("errors",), "ClearheadError", ("cache",), False),
    ],
)
def test_private_imports_are_detected(module, name, package, is_private):
    message = private_import(Import(ROOT / "x.py", 1, module, name), package)
    assert (message is not None) == is_private


def test_packages_import_only_what_they_may():
    forbidden = []
    for path in FILES:
        if not top_level(path).startswith("__"):
            allowed = ALLOWED_IMPORTS.get(top_level(path), set()) | BASICS | {top_level(path)}
            forbidden += [str(statement) for statement in imports_of(path) if target_of(statement) not in allowed]
    assert forbidden == []


def test_every_allowed_import_is_used():
    used: dict[str, set[str]] = {}
    for path in FILES:
        used.setdefault(top_level(path), set()).update(target_of(statement) for statement in imports_of(path))
    assert {name: allowed - used[name] for name, allowed in ALLOWED_IMPORTS.items() if allowed - used[name]} == {}


def test_imports_between_packages_form_no_cycle():
    assert list(TopologicalSorter(ALLOWED_IMPORTS).static_order())
    with pytest.raises(CycleError):
        list(TopologicalSorter(ALLOWED_IMPORTS | {"model": {"api"}}).static_order())


def sub_packages() -> list[Path]:
    return [path.parent for path in FILES if path.name == "__init__.py" and len(package_of(path)) == 1]


@pytest.mark.parametrize("folder", sub_packages(), ids=lambda folder: folder.name)
def test_modules_inside_a_package_form_no_cycle(folder):
    """Compare modules, and sub-packages as a whole; an `__init__` only gathers names."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        if path.is_relative_to(folder) and path.name != "__init__.py":
            part = path.relative_to(folder).parts[0].removesuffix(".py")
            targets = {
                (*statement.module, statement.name)[1]
                for statement in imports_of(path)
                if statement.module[:1] == (folder.name,)
                and (len(statement.module) > 1 or (folder / f"{statement.name}.py").exists())
            }
            graph.setdefault(part, set()).update(targets - {part})
    list(TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=lambda p: str(p.parent))
def test_exported_names_are_sorted_and_differ_from_submodules(path):
    names = exported(package_of(path))
    modules = {file.stem for file in path.parent.glob("*.py")} | {
        file.parent.name for file in path.parent.glob("*/*.py")
    }
    assert {name for name in names & modules if defines(path, name)} == set()


def defines(init: Path, name: str) -> bool:
    """Return whether an `__init__` binds this name to something other than the submodule itself."""
    return any(found.name == name and found.module != package_of(init) for found in imports_of(init))
