"""The usage lines of modules: sound Python that calls what there is, with arguments it takes; or a command there is."""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest
import typer

import clearhead
from clearhead.cli.app import app
from clearhead.errors import ClearheadError

SOURCE = Path(clearhead.__file__).parent
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py"))
CODE = re.compile(r"\w+(, \w+)* = |[\w.]+\(|(with|for|from|import) |clearhead ")
GIVEN = {"network", "norm", "block", "cross_entropy", "save"}  # called in usage lines, and made elsewhere
COMMANDS = typer.main.get_command(app).commands


def usage_of(path: Path) -> str:
    """The paragraph after the first line, where it is code: a family says instead where its sizes are from."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False)
    paragraph = dedent(text.partition("\n")[2].strip("\n").partition("\n\n")[0]).strip()
    return paragraph if CODE.match(paragraph) else ""


USAGES = {path: usage for path in FILES if (usage := usage_of(path))}


def module_of(path: Path) -> ModuleType:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return import_module(".".join(parts))


@cache
def everything() -> dict[str, object]:
    """All names of all modules; where several have one, any of them."""
    known = {}
    for path in FILES:
        with suppress(ImportError, ClearheadError):  # what needs a GPU's compiler, or a package that is not here
            known |= vars(module_of(path))
    return known


def assigned(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def wrong_calls(tree: ast.AST, module: ModuleType) -> Iterator[str]:
    """Calls by a plain name of what is not there, or with arguments that it does not take."""
    public = {name: getattr(clearhead, name) for name in clearhead.__all__}
    known = everything() | vars(builtins) | public | vars(module)
    free = assigned(tree) | GIVEN
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id in free:
            continue
        if node.func.id not in known:
            yield f"there is no {node.func.id}"
        elif node.func.id not in vars(builtins) and not takes(known[node.func.id], node):
            yield f"{node.func.id} does not take {ast.unparse(node)}"


def takes(called: object, node: ast.Call) -> bool:
    if any(isinstance(argument, ast.Starred) for argument in node.args) or any(k.arg is None for k in node.keywords):
        return True
    try:
        inspect.signature(called).bind(*node.args, **{keyword.arg: keyword for keyword in node.keywords})
    except TypeError:
        return any(isinstance(argument, ast.Constant) and argument.value is ... for argument in node.args)
    return True


def test_most_modules_show_how_they_are_used():
    assert len(USAGES) > 0.7 * len(FILES)


@pytest.mark.parametrize("path", USAGES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_usage_line(path):
    usage = USAGES[path]
    if usage.startswith("clearhead "):
        command = usage.split()[1]
        assert command.startswith("--") or command in COMMANDS
        return
    try:
        module = module_of(path)
    except ClearheadError as error:
        pytest.skip(str(error))
    assert list(wrong_calls(ast.parse(usage), module)) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("expand_table(table, config, own_names)", []),
        ("expand_tabel(table)", ["there is no expand_tabel"]),
        ("expand_table(table, cfg=config)", ["expand_table does not take expand_table(table, cfg=config)"]),
        ("expand_table(table)", ["expand_table does not take expand_table(table)"]),
    ],
)
def test_a_stale_line_is_seen(line, complaint):
    assert list(wrong_calls(ast.parse(line), module_of(SOURCE / "families" / "tensor_rules.py"))) == complaint
