"""Test the script that runs the pages: it finds their commands, types them into a shell and sees how they end."""

import os

import pytest

from tests.first_hour import terminal as terminal_module
from tests.first_hour.pages import Step, read_steps, split_commands
from tests.first_hour.record import Record, Row
from tests.first_hour.run import PAGES, ROOT, new_steps, newcomer_environment, run_pages, succeeded
from tests.first_hour.terminal import Answer, Outcome, Terminal, visible_text

PAGE = """
# Title

```bash
make demo    # sets up everything
cat <<END > file.txt
clearhead
END
```

| command | example |
|---|---|
| get | `clearhead get smollm2` and `not a command` |

```
clearhead is a word in a block without a language
```

```python
print("hello")
```

```bash
make test
clearhead train capitals \\
    --out run
```

Type `clearhead nothing` between tables.

| another table |
|---|
| `clearhead list` |
"""


def test_steps_of_a_page_come_in_order(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    steps = read_steps(tmp_path / "page.md", tmp_path)
    script = tmp_path / next(path.name for path in tmp_path.glob("page-*.py"))
    assert script.read_text() == 'print("hello")\n'
    assert [step.command for step in steps] == [
        "make demo    # sets up everything",
        "cat <<END > file.txt\nclearhead\nEND",
        "clearhead get smollm2",
        f"python {script}",
        "clearhead train capitals \\\n    --out run",
        "clearhead list",
    ]
    assert steps[0].page == "page.md"


def test_a_command_that_does_not_end_is_an_error():
    with pytest.raises(ValueError, match="does not end: echo"):
        list(split_commands('echo "never closed'))


def test_the_shell_keeps_its_state_and_reports_exit_codes(tmp_path):
    with Terminal(tmp_path, {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}) as terminal:
        assert terminal.run("x=42; cd /").code == 0
        outcome = terminal.run('echo "x is $x" in $PWD 今天')
        assert (outcome.code, "x is 42 in / 今天" in outcome.output) == (0, True)
        assert terminal.run("false").code == 1
        assert "lines: 3" in terminal.run("echo lines: $(printf 'a\nb\nc\n' | wc -l)").output
        busy = terminal.run(
            "python3 -c 'import time; t = time.process_time()\nwhile time.process_time() < t + 0.5: pass'"
        )
        assert 0.4 < busy.cpu_seconds < 5
        assert terminal.run("no_such_command").code == 127
        outcome = terminal.run("tput cols; test -t 0 -a -t 1 -a -t 2")
        assert (outcome.code, "100" in outcome.output) == (0, True)


def test_an_interactive_command_gets_its_answers_and_a_slow_one_is_stopped(tmp_path):
    with Terminal(tmp_path, {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}) as terminal:
        command = "read -p 'name> ' name; read -p \"$name> \" rest || echo end"
        outcome = terminal.run(command, [Answer("name> $", "Ada\r"), Answer("Ada> $", "\x04")])
        assert outcome.output.count("Ada> ") == 1
        assert "\nend" in outcome.output or "Ada> end" in outcome.output
        outcome = terminal.run("sleep 60", timeout_seconds=1.5)
        assert outcome.code == 124
        assert outcome.seconds < 40  # the command would take 60
        assert terminal.run("true").code == 0


def test_a_command_that_ignores_ctrl_c_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(terminal_module, "_STOP_SECONDS", 2.0)
    with Terminal(tmp_path, {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}) as terminal:
        outcome = terminal.run("bash -c 'trap : INT; while :; do sleep 0.2; done'", timeout_seconds=1.5)
        assert outcome.code == 124
        assert "Ctrl-C did not stop it" in outcome.output
        assert "still here" in terminal.run("echo still here").output


def test_a_progress_bar_is_shown_once():
    assert visible_text("a\r\n\x1b[2Kloading 1/2\r\x1b[2Kloading 2/2\r\nend") == "a\nloading 2/2\nend"


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [(0, "fine", True), (1, "fine", False), (0, "Traceback (most recent call last):", False)],
)
def test_success(code, output, expected):
    assert succeeded(Outcome(code, 0.0, 0.0, output)) is expected


def test_a_newcomer_has_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEARHEAD_HOME", "somewhere")
    monkeypatch.setenv("PATH", f"/project/.venv/bin{os.pathsep}/usr/bin")
    environment = newcomer_environment(tmp_path)
    assert environment["HOME"] == str(tmp_path)
    assert environment["PATH"] == "/usr/bin"
    assert "CLEARHEAD_HOME" not in environment


def test_the_pages_of_this_repository_have_commands_and_each_is_typed_once(tmp_path):
    steps = list(new_steps([ROOT / page for page in PAGES], tmp_path))
    assert Step("README.md", "source .venv/bin/activate") in steps
    commands = [step.command for step in steps]
    assert len(set(commands)) == len(commands)
    assert sum(command.startswith("make demo") for command in commands) == 1


def test_a_later_start_types_only_its_pages_and_what_the_shell_needs(tmp_path):
    (tmp_path / "first.md").write_text("```bash\nexport NAME=Ada\ntouch first\n```\n")
    (tmp_path / "second.md").write_text("```bash\ntest $NAME = Ada\nfalse\n```\n")
    work = tmp_path / "work"
    work.mkdir()
    pages, environment = [tmp_path / "first.md", tmp_path / "second.md"], {"PATH": os.environ["PATH"]}
    run_pages(pages, ["second.md"], work, environment, Record(tmp_path))
    assert not list(work.iterdir())
    run_pages(pages, ["first.md", "second.md"], work, environment, Record(tmp_path))
    assert [path.name for path in work.iterdir()] == ["first"]
    rows = Record(tmp_path).rows
    assert [row.command for row in rows] == ["test $NAME = Ada", "false", "export NAME=Ada", "touch first"]
    assert [row.succeeded for row in rows] == [True, False, True, True]


def test_the_record_keeps_earlier_starts_and_replaces_a_repeated_command(tmp_path):
    Record(tmp_path).add(Row("a.md", "make demo", 80.0, 60.0, False), "it failed")
    record = Record(tmp_path)
    record.add(Row("a.md", "make demo", 90.0, 70.0, True), "it worked")
    record.add(Row("b.md", "clearhead list", 30.0, 0.5, True), "")
    assert Record(tmp_path).rows == record.rows
    assert len(record.rows) == 2
    lines = record.table().splitlines()
    assert " ".join(lines[-1].split()) == "120.0 70.5 all 2 commands, 0 failed: 2.0 minutes"
    assert "it failed" in (tmp_path / "first_hour.log").read_text()
