"""Rules of the house as tests: which room may import which, how long a file may be, what the public face is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

SOURCE = Path(clearhead.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# A room may import itself, `errors` and `config` (machinery), and these.
ARROWS = {
    "model": set(),
    "families": {"model"},
    "tokenization": set(),
    "checkpoint": {"families", "model", "tokenization"},
    "cache": {"model"},
    "generation": {"cache", "model", "tokenization"},
    "summary": {"model"},
    "conversation": {"bundle", "cache", "generation", "tokenization"},  # bundle for its type only
    "bundle": {"checkpoint", "conversation", "families", "generation", "model", "tokenization"},
    "demo": {"bundle", "checkpoint", "families", "model", "summary", "tokenization"},
    "terminal": {"conversation"},
    "verification": {"bundle", "cache", "fast", "generation", "model"},
    "fast": {"cache", "model"},
    "data": {"tokenization"},
    "cost": {"cache", "families", "model"},
    "evaluation": {"bundle", "data", "generation", "model", "tokenization"},
    "training": {"bundle", "checkpoint", "cost", "data", "evaluation", "families", "model", "tokenization"},
    "inspection": {"bundle", "cache", "generation", "model", "tokenization"},
    "benchmark": {"bundle", "cache", "checkpoint", "fast", "generation", "model"},
    "cli": {
        "benchmark",
        "bundle",
        "checkpoint",
        "cost",
        "data",
        "demo",
        "evaluation",
        "families",
        "generation",
        "inspection",
        "summary",
        "terminal",
        "tokenization",
        "training",
        "verification",
    },
    "config": set(),
    "errors": set(),
}


def room_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("clearhead."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.ImportFrom) and node.module == "clearhead":
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) not in ("__init__", "__main__")], ids=str)
def test_arrows_point_one_way(path):
    room = room_of(path)
    allowed = ARROWS[room] | {room, "errors", "config"}
    assert set(imported_rooms(path)) <= allowed


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 80, node.name


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_no_pickle_and_no_remote_code():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for word in ("import pickle", "torch.load(", "trust_remote_code", "allow_pickle=True", "eval(", "exec("):
            assert word not in text.replace(".eval()", ""), f"{word} in {path}"


def test_public_names_are_sorted_and_there():
    assert clearhead.__all__ == sorted(clearhead.__all__)
    assert set(clearhead.HOMES) == set(clearhead.__all__)
    assert all(getattr(clearhead, name) is not None for name in clearhead.__all__)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        clearhead.laod  # noqa: B018


@pytest.mark.parametrize("module", ["clearhead", "clearhead.cli", "clearhead.tokenization.base", "clearhead.errors"])
def test_light_imports_bring_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_forward_is_at_most_eight_files():
    """The walk of model/__init__.py names the files, and these are they."""
    walk = ["transformer", "embedding", "sight", "block", "attention", "attend", "feed_forward"]
    told = clearhead.model.__doc__ if hasattr(clearhead, "model") else __import__("clearhead.model").model.__doc__
    assert all(f"    {name} " in told for name in walk)
    assert len(walk) <= 8
    assert all((SOURCE / "model" / f"{name}.py").is_file() for name in walk)
