"""The README's Python snippets run; its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = re.findall(r"^clearhead ([a-z]+)", README.read_text(encoding="utf-8"), re.MULTILINE)


def test_there_are_snippets():
    assert len(SNIPPETS) >= 2
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number, tmp_path, monkeypatch, request):
    if "smollm2" in SNIPPETS[number]:
        request.getfixturevalue("smollm2_gguf")
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README snippet {number}", "exec"), {})


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_command_exists(command):
    done = subprocess.run([sys.executable, "-m", "clearhead", command, "--help"], capture_output=True, check=False)
    assert done.returncode == 0
