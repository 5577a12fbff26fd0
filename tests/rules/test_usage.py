"""Usage examples in module docstrings call existing functions with valid arguments, or name an existing command."""

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
ASSUMED = {"network", "norm", "block", "cross_entropy", "save"}  # objects that usage lines assume
COMMANDS = typer.main.get_command(app).commands


def usage_of(path: Path) -> str:
    """Return the paragraph after the first line of a module docstring if it is code, else an empty string."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False)
    paragraph = dedent(text.partition("\n")[2].strip("\n").partition("\n\n")[0]).strip()
    return paragraph if CODE.match(paragraph) else ""


USAGES = {path: usage for path in FILES if (usage := usage_of(path))}


def module_of(path: Path) -> ModuleType:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return import_module(".".join(parts))


@cache
def all_names() -> dict[str, object]:
    """Return the names of all modules. Of equal names, the last one counts."""
    known = {}
    for path in FILES:
        with suppress(ImportError, ClearheadError):  # needs a GPU compiler or an optional package
            known |= vars(module_of(path))
    return known


def assigned(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def wrong_calls(tree: ast.AST, module: ModuleType) -> Iterator[str]:
    """Yield a message for each call of an unknown function, or with arguments that it does not accept."""
    public = {name: getattr(clearhead, name) for name in clearhead.__all__}
    known = all_names() | vars(builtins) | public | vars(module)
    free = assigned(tree) | ASSUMED
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id in free:
            continue
        if node.func.id not in known:
            yield f"{node.func.id} does not exist"
        elif node.func.id not in vars(builtins) and not accepts(known[node.func.id], node):
            yield f"{node.func.id} does not accept {ast.unparse(node)}"


def accepts(called: object, node: ast.Call) -> bool:
    if any(isinstance(argument, ast.Starred) for argument in node.args) or any(k.arg is None for k in node.keywords):
        return True
    try:
        inspect.signature(called).bind(*node.args, **{keyword.arg: keyword for keyword in node.keywords})
    except TypeError:
        return any(isinstance(argument, ast.Constant) and argument.value is ... for argument in node.args)
    return True


def test_most_modules_have_a_usage_example():
    assert len(USAGES) > 0.7 * len(FILES)


def wrong_usage(path: Path, usage: str) -> list[str]:
    if usage.startswith("clearhead "):
        command = usage.split()[1]
        return [] if command.startswith("--") or command in COMMANDS else [f"there is no command {command}"]
    try:
        module = module_of(path)
    except ClearheadError:  # needs a package that is not installed
        return []
    try:
        return list(wrong_calls(ast.parse(usage), module))
    except SyntaxError as error:
        return [str(error)]


def test_usage_examples_are_valid():
    messages = {str(path.relative_to(SOURCE)): wrong_usage(path, usage) for path, usage in USAGES.items()}
    assert {name: wrong for name, wrong in messages.items() if wrong} == {}


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ("expand_table(table, config, own_names)", []),
        ("expand_tabel(table)", ["expand_tabel does not exist"]),
        ("expand_table(table, cfg=config)", ["expand_table does not accept expand_table(table, cfg=config)"]),
        ("expand_table(table)", ["expand_table does not accept expand_table(table)"]),
    ],
)
def test_stale_examples_are_detected(line, messages):
    assert list(wrong_calls(ast.parse(line), module_of(SOURCE / "families" / "tensor_rules.py"))) == messages
