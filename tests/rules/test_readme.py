"""Test README.md and docs: Python snippets run, commands parse, and links point to existing files."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from clearhead.cli.app import app
from clearhead.families import presets

ROOT = Path(__file__).parents[2]
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
SNIPPETS = {
    f"{path.stem} {number}": snippet
    for path, text in PAGES.items()
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
COMMANDS = sorted({line for text in PAGES.values() for line in re.findall(r"^clearhead .*", text, re.MULTILINE)})
FIXTURES = {"smollm2": "smollm2_gguf", "minilm": "minilm", "opus-mt-zh-en": "opus_mt"}


def test_snippets_and_commands_are_found():
    assert len(SNIPPETS) >= 7
    assert len(COMMANDS) >= 20


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_runs(name, tmp_path, monkeypatch, request):
    for model, fixture in FIXTURES.items():
        if f'"{model}"' in SNIPPETS[name]:
            request.getfixturevalue(fixture)
    if "lm_eval" in SNIPPETS[name]:
        pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[name], f"snippet {name}", "exec"), {})


@pytest.mark.parametrize("line", COMMANDS)
def test_command_parses(line):
    """Parse the command with its arguments and options, without running it; its recipe must exist."""
    command, arguments = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    command.make_context(command.name, list(arguments))
    assert all((ROOT / argument).is_file() for argument in arguments if argument.startswith("configs/"))


def test_the_table_of_families_counts_every_preset():
    table = PAGES[ROOT / "README.md"].split("| presets |")[1].split("\n\n")[0]
    assert sum(int(count) for count in re.findall(r"\| (\d+) \|", table)) == len(presets())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_point_to_existing_files(path):
    links = re.findall(r"\]\(([^)#:]+)\)|<img src=\"([^\"]+)\"", PAGES[path])
    assert all((path.parent / (link or picture)).exists() for link, picture in links)
