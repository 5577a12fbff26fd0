"""Test README.md and docs: Python snippets run, commands parse, and links point to existing files."""

import re
import shlex
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import typer

import clearhead
from clearhead.api import load
from clearhead.cli.app import app
from clearhead.families import presets
from clearhead.inspection import patching

ROOT = Path(__file__).parents[2]
PAGES = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
COMMAND = re.compile(r"`(clearhead [^`|]+)`")  # in the cell of a table
SNIPPETS = {
    f"{path.stem} {number}": snippet
    for path, text in PAGES.items()
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
BLOCKS = [  # page, language and text of each block
    (path.name, language, text)
    for path, page in PAGES.items()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
]
TABLE_ROWS = [row for text in PAGES.values() for row in re.findall(r"^\|.*", text, re.MULTILINE)]
COMMANDS = sorted(
    {line for text in PAGES.values() for line in re.findall(r"^clearhead .*", text, re.MULTILINE)}
    | {command for row in TABLE_ROWS for command in COMMAND.findall(row)}
)
FIXTURES = {"smollm2": "smollm2_gguf", "minilm": "minilm", "opus-mt-zh-en": "opus_mt"}


def test_snippets_and_commands_are_found():
    assert len(SNIPPETS) >= 7
    assert len(COMMANDS) >= 20


@cache
def loaded(name):
    return load(name)


@pytest.fixture
def faster(monkeypatch):
    """Load a model with default options once for all snippets, and patch only every tenth of its layers."""
    patch, effects = patching.patch, {}

    def patch_every_tenth(clean, corrupted, layer, positions, **options):
        if layer % 10 == 0:
            effects[tuple(positions)] = patch(clean, corrupted, layer, positions, **options)
        return effects[tuple(positions)]

    monkeypatch.setattr(patching, "patch", patch_every_tenth)
    monkeypatch.setattr(clearhead, "load", lambda name, **options: load(name, **options) if options else loaded(name))


@pytest.mark.parametrize("name", SNIPPETS)
@pytest.mark.usefixtures("faster")
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
    with suppress(typer.Exit):  # --help exits
        command.make_context(command.name, list(arguments))
    assert all((ROOT / argument).is_file() for argument in arguments if argument.startswith("configs/"))


def test_commands_are_in_bash_blocks():
    """tests/first_hour types the lines of bash blocks, so a command elsewhere would never be run."""
    other = [(page, text) for page, language, text in BLOCKS if language != "bash"]
    assert not [page for page, text in other if re.search(r"^(clearhead|make|pip install) ", text, re.MULTILINE)]
    assert len(BLOCKS) - len(other) >= 10


def test_every_command_is_in_the_readme():
    """The table of the README has an example of each command, except for those that other commands include."""
    table = PAGES[ROOT / "README.md"].partition("## Commands")[2].partition("## ")[0]
    shown = {command.split()[1] for command in COMMAND.findall(table)}
    commands = set(typer.main.get_command(app).commands)
    assert commands - shown == {"demo", "presets", "curves"}


def test_the_table_of_families_counts_every_preset():
    table = PAGES[ROOT / "README.md"].split("| presets |")[1].split("\n\n")[0]
    assert sum(int(count) for count in re.findall(r"\| (\d+) \|", table)) == len(presets())
    assert f"`presets` lists {len(presets())} |" in PAGES[ROOT / "README.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_point_to_existing_files(path):
    links = re.findall(r"\]\(([^)#:]+)\)|<img src=\"([^\"]+)\"", PAGES[path])
    assert all((path.parent / (link or picture)).exists() for link, picture in links)
