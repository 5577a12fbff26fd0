"""Packages are entered through their `__init__`, and depend on each other in one direction only."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.rules.source import FILES, ROOT, Import, exported, imports_of, is_package, package_of, top_level

BASICS = {"config", "errors", "files", "home"}  # modules without dependencies that any package may import

# What each package or module may import, besides itself and the basics. docs/architecture.md draws this table.
ARROWS = {
    "architecture": set(),
    "model": {"architecture"},
    "families": {"architecture"},
    "tokenization": set(),
    "catalog": set(),
    "options": set(),
    "cache": {"architecture", "model"},
    "backends": {"architecture", "cache", "model"},
    "checkpoint": {"architecture", "backends", "catalog", "families", "model", "tokenization"},
    "generation": {"architecture", "backends", "cache", "model", "options", "tokenization"},
    "inspection": {"architecture", "cache", "data", "generation", "model", "options", "tokenization"},
    "api": {
        *("architecture", "backends", "cache", "checkpoint", "families", "generation", "inspection", "model"),
        *("options", "tokenization"),
    },
    "summary": {"architecture", "costs"},
    "costs": {"architecture", "backends", "cache", "model"},
    "data": {"tokenization"},
    "evaluation": {"api", "architecture", "cache", "data", "generation", "model", "tokenization"},
    "verification": {"api", "architecture", "backends", "cache", "generation", "model", "options"},
    "training": {"api", "architecture", "backends", "costs", "data", "families", "model", "tokenization"},
    "benchmark": {"api", "architecture", "backends", "cache", "checkpoint", "generation", "model", "options"},
    "cli": {
        *("api", "architecture", "benchmark", "catalog", "checkpoint", "costs", "data", "evaluation", "families"),
        *("generation", "inspection", "options", "summary", "tokenization", "training", "verification"),
    },
    **{name: set() for name in BASICS},
}


def target_of(one: Import) -> str:
    """Return the package or module directly below clearhead that is imported."""
    return one.module[0] if one.module else one.name


def past_the_interface(one: Import, package: tuple[str, ...]) -> str | None:
    """Say what is wrong with an import by a file of `package`, or None."""
    if not one.module:  # from clearhead import name
        return None
    home = one.module if is_package(one.module) else one.module[:-1]
    if package[: len(home)] == home:  # the file's own package, or one around it
        return None
    if not is_package(one.module) and len(one.module) > 1:
        return f"{one}: import it from clearhead.{'.'.join(home)}"
    if is_package(one.module) and one.name not in exported(one.module):
        return f"{one}: {one.name} is not in its __all__"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_other_packages_are_imported_through_their_init(path):
    wrong = [past_the_interface(one, package_of(path)) for one in imports_of(path)]
    assert [sentence for sentence in wrong if sentence] == []


@pytest.mark.parametrize(
    ("module", "name", "package", "is_wrong"),
    [
        (("cache", "pages"), "PagePool", ("generation",), True),
        (("cache",), "KeyValueCache", ("generation",), False),
        (("cache",), "not_exported", ("generation",), True),
        (("cache", "pages"), "PagePool", ("cache",), False),
        (("backends", "capability"), "anything", ("backends", "cpu"), False),
        (("errors",), "ClearheadError", ("cache",), False),
    ],
)
def test_the_rule_sees_an_import_past_the_interface(module, name, package, is_wrong):
    found = past_the_interface(Import(ROOT / "x.py", 1, module, name), package)
    assert (found is not None) == is_wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    if top_level(path).startswith("__"):
        return
    allowed = ARROWS[top_level(path)] | BASICS | {top_level(path)}
    assert {target_of(one) for one in imports_of(path)} <= allowed


def test_every_arrow_is_used():
    used: dict[str, set[str]] = {}
    for path in FILES:
        used.setdefault(top_level(path), set()).update(target_of(one) for one in imports_of(path))
    assert {name: arrows - used[name] for name, arrows in ARROWS.items() if arrows - used[name]} == {}


def test_arrows_form_no_cycle():
    assert list(TopologicalSorter(ARROWS).static_order())
    with pytest.raises(CycleError):
        list(TopologicalSorter(ARROWS | {"model": {"api"}}).static_order())


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
                (*one.module, one.name)[1]
                for one in imports_of(path)
                if one.module[:1] == (folder.name,) and (len(one.module) > 1 or (folder / f"{one.name}.py").exists())
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
    """Tell whether an `__init__` binds this name to something other than the submodule itself."""
    return any(one.name == name and one.module != package_of(init) for one in imports_of(init))
