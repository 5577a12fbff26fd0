"""Rules of the house as tests: which room may import which, how long a file may be, what the public face is."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

import clearhead

SOURCE = Path(clearhead.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# A room may import itself, `errors`, `files`, `home` and `config` (machinery), and these.
ARROWS = {
    "model": set(),
    "families": {"model"},
    "tokenization": set(),
    "checkpoint": {"families", "fast", "model", "tokenization"},
    "cache": {"model"},
    "generation": {"cache", "fast", "model", "tokenization"},
    "summary": {"model"},
    "conversation": {"cache", "generation", "tokenization"},
    "bundle": {"checkpoint", "conversation", "families", "fast", "generation", "inspection", "model", "tokenization"},
    "demo": {"bundle", "checkpoint", "families", "model", "summary", "tokenization"},
    "terminal": {"conversation"},
    "verification": {"bundle", "cache", "fast", "generation", "model"},
    "fast": {"cache", "model"},
    "data": {"tokenization"},
    "cost": {"cache", "fast", "model"},
    "evaluation": {"bundle", "cache", "data", "generation", "model", "tokenization"},
    "training": {"bundle", "checkpoint", "cost", "data", "evaluation", "families", "fast", "model", "tokenization"},
    "inspection": {"bundle", "cache", "generation", "model", "tokenization"},  # bundle for its type only
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
    "files": set(),
    "home": set(),
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
    allowed = ARROWS[room] | {room, "errors", "files", "home", "config"}
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


FORBIDDEN = ("import pickle", r"torch\.load\(", "trust_remote_code", "allow_pickle=True", r"(?<!\.)\b(eval|exec)\(")


def test_no_pickle_and_no_remote_code():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for word in FORBIDDEN:
            assert not re.search(word, text), f"{word} in {path}"


def test_public_names_are_sorted_and_there():
    assert clearhead.__all__ == sorted(clearhead.__all__)
    assert set(clearhead.HOMES) == set(clearhead.__all__)
    assert all(getattr(clearhead, name) is not None for name in clearhead.__all__)
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        clearhead.laod  # noqa: B018


@pytest.mark.parametrize(
    "module", ["clearhead", "clearhead.cli", "clearhead.families", "clearhead.tokenization.load", "clearhead.errors"]
)
def test_light_imports_bring_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def files_of_a_forward():
    """The files of model/ that a forward of a decoder with rotary grouped attention runs through, in their order."""
    config = clearhead.preset("llama-3.2-1b")
    layer = replace(config.decoder.layers[0], feed_forward=replace(config.decoder.layers[0].feed_forward, width=8))
    layer = replace(layer, attention=replace(layer.attention, num_heads=4, num_kv_heads=2, head_width=4))
    embedding = replace(config.decoder.embedding, vocab_size=5)
    stack = replace(config.decoder, embedding=embedding, layers=(layer,))
    network, seen = clearhead.Transformer(replace(config, width=8, decoder=stack)), {}

    def listen(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == SOURCE / "model":
            seen[path.stem] = True

    sys.setprofile(listen)
    try:
        network(torch.tensor([[1, 2, 3]]))
    finally:
        sys.setprofile(None)
    return list(seen)


def test_one_forward_is_at_most_eight_files():
    """The walk that model/__init__.py tells is the one that is taken; beside it stand data and formulas."""
    told = import_module("clearhead.model").__doc__
    walk = re.findall(r"^    ([a-z_]+)  ", told, re.MULTILINE)
    assert len(walk) <= 8
    beside = {"config", "parts", "masks", "norms", "positions"}
    assert [name for name in files_of_a_forward() if name not in beside] == walk
