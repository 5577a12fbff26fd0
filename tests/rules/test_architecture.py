"""Rules about files: how long they may be, what they must say and must not do, and which ones a forward pass runs."""

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
from tests.rules.source import FILES, ROOT

MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 300, 80
LONGEST_CALL_PATH = 8


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES_OF_A_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= MOST_LINES_OF_A_FUNCTION, node.name


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
    assert set(clearhead.MODULES) == set(clearhead.__all__)
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
    """Return the files of model/ that the forward pass of a LLaMA-style decoder runs through, in order."""
    config = clearhead.preset("llama-3.2-1b")
    layer = replace(config.decoder.layers[0], feed_forward=replace(config.decoder.layers[0].feed_forward, width=8))
    layer = replace(layer, attention=replace(layer.attention, num_heads=4, num_kv_heads=2, head_width=4))
    embedding = replace(config.decoder.embedding, vocab_size=5)
    stack = replace(config.decoder, embedding=embedding, layers=(layer,))
    network, seen = clearhead.Transformer(replace(config, width=8, decoder=stack)), {}

    def record(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == ROOT / "model":
            seen[path.stem] = True

    sys.setprofile(record)
    try:
        network(torch.tensor([[1, 2, 3]]))
    finally:
        sys.setprofile(None)
    return list(seen)


def test_one_forward_is_at_most_eight_files():
    """The docstring of clearhead.model lists the files of a forward pass in order; formulas are listed apart."""
    documented = re.findall(r"^    ([a-z_]+)  ", import_module("clearhead.model").__doc__, re.MULTILINE)
    assert len(documented) <= LONGEST_CALL_PATH
    formulas = {"masks", "norms", "positions"}
    assert [name for name in files_of_a_forward() if name not in formulas] == documented
