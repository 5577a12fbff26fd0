"""Control characters from files and models never reach the terminal, and very long messages are cut."""

import io
import json
import subprocess
import sys
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.columns import Columns
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from clearhead.cli.app import echo, print_json, print_message
from clearhead.errors import ClearheadError
from clearhead.terminal import TerminalConsole, escape_controls, escape_in_json, one_line
from tests.checkpoint.tiny import tiny_network
from tests.cli.test_commands import clearhead  # noqa: F401  (a fixture)

BIDIRECTIONAL = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\rx\x7f\u202egnp\u2066\n[bold]:smile:"
# Letters, and often the characters that a terminal or rich would act on.
TEXTS = st.text(st.one_of(st.characters(), st.sampled_from(HOSTILE)), max_size=60)


def controls_in(text, allowed="\n\t"):
    return {
        char for char in text if char not in allowed and (unicodedata.category(char) == "Cc" or char in BIDIRECTIONAL)
    }


# --- the functions


@given(TEXTS)
def test_escaped_text_has_no_control_characters(text):
    escaped = escape_controls(text)
    assert controls_in(escaped) == set()
    assert escape_controls(escaped) == escaped
    if not controls_in(text):
        assert escaped == text


def test_escapes_show_which_character_it_was():
    assert escape_controls("a\x1b[1m\x9b\u202e\t\n") == "a\\x1b[1m\\x9b\\u202e\t\n"


@given(st.one_of(TEXTS, st.text(st.sampled_from("\x1b\n a"), min_size=150, max_size=400)))
def test_a_message_is_one_line_of_limited_length(text):
    line = one_line(text, max_length=150)
    assert controls_in(line, allowed="\t") == set()
    assert len(line) <= 150
    assert one_line(line, max_length=150) == line


def test_a_cut_message_keeps_its_start_and_its_end():
    line = one_line("wrong: " + "x" * 10**7 + "; use another")
    assert line.startswith("wrong: xxx")
    assert line.endswith("xxx; use another")
    assert "(cut; the whole text has 10,000,020 characters)" in line


JSON = st.recursive(TEXTS | st.integers() | st.none(), lambda part: st.lists(part) | st.dictionaries(TEXTS, part))


@given(JSON)
def test_escaped_json_is_the_same_data(data):
    text = json.dumps(data, ensure_ascii=False)
    assert controls_in(escape_in_json(text)) == set()
    assert json.loads(escape_in_json(text)) == data


# --- the console


def printed(*renderables, **options):
    """Return what a terminal without styles receives."""
    console = TerminalConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    console.print(*renderables, **options)
    return console.file.getvalue()


def table_of(text):
    table = Table("name", title=Text(text))
    table.add_row(Text(text))
    return table


@given(TEXTS)
@pytest.mark.parametrize("wrap", [Text, table_of, lambda text: Panel(Text(text)), lambda text: Columns([Text(text)])])
def test_no_renderable_prints_control_characters(wrap, text):
    assert controls_in(printed(wrap(text))) == set()


@given(TEXTS)
def test_plain_strings_print_no_control_characters(text):
    assert controls_in(printed(text, markup=False)) == set()
    assert controls_in(printed(text, markup=False, soft_wrap=True)) == set()


def test_names_that_look_like_markup_or_emoji_are_printed_as_they_are():
    assert printed("[bold]:smile:", markup=False) == "[bold]:smile:\n"


def test_a_progress_bar_prints_no_control_characters_of_a_name():
    console = TerminalConsole(file=io.StringIO(), force_terminal=True, color_system=None, width=200)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(f"loading {HOSTILE}")
    output = console.file.getvalue()
    assert "\\x1b[2J" in output
    assert "[bold]:smile:" in output
    assert [part for part in ("\x1b[2J", "\x1b]0;", "\x9b", "\u202e") if part in output] == []


def test_styles_of_the_console_still_work():
    console = TerminalConsole(file=io.StringIO(), force_terminal=True, color_system="standard", width=60)
    console.print(Text("a\x1b[2Jb", style="bold"))
    assert console.file.getvalue() == "\x1b[1ma\\x1b[2Jb\x1b[0m\n"


# --- the command line


def test_messages_are_one_safe_line(capsys):
    print_message("error", HOSTILE + "x" * 10**6)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 2100
    assert controls_in(error) == set()
    assert "[bold]:smile:" in error


@pytest.mark.parametrize("is_tty", [True, False])
def test_data_is_escaped_on_a_terminal_and_unchanged_in_a_pipe(is_tty, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_tty)
    monkeypatch.setattr(sys, "stdout", stream)
    echo(HOSTILE)
    assert stream.getvalue() == (escape_controls(HOSTILE) if is_tty else HOSTILE) + "\n"


def test_json_never_contains_control_characters(capsys):
    print_json({HOSTILE: [HOSTILE]})
    output = capsys.readouterr().out
    assert controls_in(output) == set()
    assert json.loads(output) == {HOSTILE: [HOSTILE]}


@pytest.fixture
def hostile_folder(tmp_path):
    """A Hugging Face folder with a tensor of a hostile name that the network lacks."""
    from clearhead.checkpoint.huggingface import save_folder

    folder = tmp_path / "model"
    save_folder(tiny_network(), folder)
    return folder


@pytest.mark.parametrize("name", [HOSTILE, HOSTILE * 30_000], ids=["short", "long"])
def test_a_tensor_name_cannot_write_to_the_terminal(clearhead, hostile_folder, name):  # noqa: F811
    from safetensors.torch import load_file

    file = next(hostile_folder.glob("*.safetensors"))
    save_file(load_file(file) | {name: torch.zeros(1)}, file)
    done = clearhead("generate", hostile_folder, "Hello")
    assert done.returncode == 1
    assert "gnp" in done.stderr
    assert controls_in(done.stderr) == set()
    assert done.stderr.count("\n") <= 2
    assert len(done.stderr) < 4500


def test_a_file_name_cannot_write_to_the_terminal(clearhead, tmp_path):  # noqa: F811
    path = tmp_path / "\x1b]0;owned\x07\u202e.gguf"
    path.write_bytes(b"nonsense")
    for command in ("info", "show"):
        done = clearhead(command, path)
        assert done.returncode == 1
        assert controls_in(done.stderr) == set()


def test_a_template_error_cannot_write_to_the_terminal(clearhead, monkeypatch):  # noqa: F811
    from tests.api.test_chat import chat_model

    model = chat_model()
    model.tokenizer.chat_template = "{{ raise_exception('\x1b[2Jstop\x9b1m') }}"
    monkeypatch.setattr("clearhead.cli.generate.load_model", lambda *names: model)
    monkeypatch.setattr("clearhead.cli.generate.check_model_options", lambda *names: None)
    done = clearhead("generate", "any", "Hello")
    assert "\\x1b[2Jstop" in done.stderr
    assert controls_in(done.stderr) == set()


def test_an_unknown_name_cannot_write_to_the_terminal(clearhead):  # noqa: F811
    for arguments in (("show", HOSTILE), (HOSTILE,), ("generate", "--\x1b[2J"), ("train", HOSTILE, "--out", "x")):
        done = clearhead(*arguments)
        assert done.returncode in (1, 2)
        assert controls_in(done.stderr) == set()
        assert done.stderr.count("\n") == 1


def test_warnings_and_tracebacks_are_safe():
    program = f"""
import sys, warnings
import clearhead.cli.models
from clearhead.cli import main

def warn_and_fail(*names):
    warnings.warn("look: " + {HOSTILE!r}, stacklevel=1)
    raise RuntimeError({HOSTILE!r})

clearhead.cli.models.check_architecture = warn_and_fail
sys.argv = ["clearhead", "show", "gpt2"]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "note: look: \\x1b[2J" in done.stderr
    assert "RuntimeError: \\x1b[2J" in done.stderr
    assert controls_in(done.stderr) == set()


def test_a_long_error_is_cut(clearhead, monkeypatch):  # noqa: F811
    def fail(*names):
        raise ClearheadError("x" * 10**7)

    monkeypatch.setattr("clearhead.cli.models.check_architecture", fail)
    assert len(clearhead("show", "gpt2").stderr) < 2100
