"""The README's Python snippets run; its commands can be typed as they stand."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from clearhead.cli.app import app

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^clearhead .*", README, re.MULTILINE)
FIXTURES = {"smollm2": "smollm2_gguf", "minilm": "minilm", "opus-mt-zh-en": "opus_mt"}


def test_there_are_snippets():
    assert len(SNIPPETS) >= 5
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number, tmp_path, monkeypatch, request):
    for name, fixture in FIXTURES.items():
        if f'"{name}"' in SNIPPETS[number]:
            request.getfixturevalue(fixture)
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {})


@pytest.mark.parametrize("line", COMMANDS)
def test_command_can_be_typed(line):
    """Parsed with its arguments and options, not run."""
    name, *arguments = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, arguments)
