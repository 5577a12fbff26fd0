"""Rules about source files: their length, their docstrings, forbidden code, and the files of a forward pass."""

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
from tests.rules.source import FILES, ROOT, shown, tree_of

MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 80
MAX_CALL_PATH = 8


def test_files_and_functions_are_short():
    assert [shown(path) for path in FILES if path.read_text(encoding="utf-8").count("\n") > MAX_FILE_LINES] == []
    functions = [
        (shown(path), node.name, node.end_lineno - node.lineno)
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef)
    ]
    assert [function for function in functions if function[2] > MAX_FUNCTION_LINES] == []
    assert len(functions) > 1000


def test_every_module_has_a_docstring():
    assert [shown(path) for path in FILES if not ast.get_docstring(tree_of(path))] == []


FORBIDDEN = ("import pickle", r"torch\.load\(", "trust_remote_code", "allow_pickle=True", r"(?<!\.)\b(eval|exec)\(")


def test_no_pickle_and_no_remote_code():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for word in FORBIDDEN:
            assert not re.search(word, text), f"{word} in {path}"


@pytest.mark.parametrize(
    "module", ["clearhead", "clearhead.cli", "clearhead.families", "clearhead.tokenization.load", "clearhead.errors"]
)
def test_these_modules_do_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def forward_pass_modules():
    """Return the files of model/ that the forward pass of a LLaMA-style decoder runs through, in order."""
    config = clearhead.preset("llama-3.2-1b")
    layer = replace(config.decoder.layers[0], feed_forward=replace(config.decoder.layers[0].feed_forward, width=8))
    layer = replace(layer, attention=replace(layer.attention, num_heads=4, num_kv_heads=2, head_width=4))
    embedding = replace(config.decoder.embedding, vocab_size=5)
    stack = replace(config.decoder, embedding=embedding, layers=(layer,))
    network = clearhead.Transformer(replace(config, width=8, decoder=stack))
    called = {}

    def record(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == ROOT / "model":
            called[path.stem] = True

    sys.setprofile(record)
    try:
        network(torch.tensor([[1, 2, 3]]))
    finally:
        sys.setprofile(None)
    return list(called)


def test_a_forward_pass_runs_at_most_eight_files():
    """The docstring of clearhead.model lists the files of a forward pass in order; formulas are listed separately."""
    documented = re.findall(r"^    ([a-z_]+)  ", import_module("clearhead.model").__doc__, re.MULTILINE)
    assert len(documented) <= MAX_CALL_PATH
    formulas = {"masks", "norms", "positions"}
    assert [name for name in forward_pass_modules() if name not in formulas] == documented
