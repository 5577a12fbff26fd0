"""Run every command and snippet of the README and the docs from a bare clone.

    python -m tests.first_hour.run                # clone, `make demo`, then all pages, in order
    python -m tests.first_hour.run --here         # use this checkout and its .venv, and skip `make demo`

Commands run in a pseudo-terminal, in the order of the pages and in one working folder, so that a page may use a file
that an earlier command wrote. The script prints the time and the exit code of each command, and exits with 1 if one
failed.
"""

import argparse
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/training.md", "docs/evaluation.md", "docs/cost.md")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
ROWS, COLUMNS = 30, 100
TIMEOUT_SECONDS = 600  # per command
INPUT = {"clearhead chat": "Hello\n\x04"}  # input of interactive commands; Ctrl-D exits


@dataclass(frozen=True)
class Step:
    """One command of a page; a Python snippet is a command that runs a file."""

    page: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    step: Step
    seconds: float
    code: int
    output: str


def steps_of(page: str, folder: Path, scripts: Path) -> list[Step]:
    """Return the commands and snippets of a page in order. Lines of blocks without a language are commands."""
    steps = []
    for number, (language, text) in enumerate(BLOCK.findall((folder / page).read_text(encoding="utf-8"))):
        if language == "python":
            script = scripts / f"{Path(page).stem}-{number}.py"
            script.write_text(text, encoding="utf-8")
            steps.append(Step(page, f"python {script}"))
        elif not language:
            lines = [line.partition("  #")[0].strip() for line in text.splitlines()]
            steps += [Step(page, line) for line in lines if re.match(r"(clearhead|printf|python -m clearhead) ", line)]
    return steps


def run(step: Step, folder: Path, environment: dict[str, str]) -> Outcome:
    """Run a command in a pseudo-terminal and return its outcome; a command that takes too long is killed."""
    started = time.monotonic()
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", step.command], environment)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    typed = next((text for start, text in INPUT.items() if step.command.startswith(start)), "")
    output = b""
    while time.monotonic() - started < TIMEOUT_SECONDS:
        ready, _, _ = select.select([terminal], [], [], 1.0)
        try:
            chunk = os.read(terminal, 65536) if ready else b""
        except OSError:  # Linux reports the end of the child like this
            break
        if ready and not chunk:
            break
        output += chunk
        if typed and (b">" in output or b"you" in output.lower()):  # the prompt has appeared
            os.write(terminal, typed.encode())
            typed = ""
    else:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    text = output.decode(errors="replace")
    return Outcome(step, time.monotonic() - started, os.waitstatus_to_exitcode(status), text)


def clone(target: Path) -> None:
    """Clone this repository and run `make demo` in the clone, as the README says."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
    started = time.monotonic()
    subprocess.run(["make", "demo"], cwd=target, check=True)
    print(f"make demo: {time.monotonic() - started:.0f} s", flush=True)


def main() -> int:
    """Run all pages and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="use this checkout and its .venv")
    parser.add_argument("--json", type=Path, help="also write the outcomes to this file")
    parser.add_argument("--pages", nargs="*", default=PAGES, help="pages to run")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work, scripts = Path(temporary) / "work", Path(temporary) / "scripts"
        work.mkdir()
        scripts.mkdir()
        source = ROOT
        if not arguments.here:
            source = Path(temporary) / "clearhead"
            clone(source)
        bin_folder = source / ".venv" / "bin"
        environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "TERM": "xterm-256color"}
        shutil.copytree(source / "configs", work / "configs")
        outcomes = []
        for page in arguments.pages:
            for step in steps_of(page, source, scripts):
                outcome = run(step, work, environment)
                outcomes.append(outcome)
                mark = "ok  " if outcome.code == 0 else f"FAIL {outcome.code}"
                print(f"{mark} {outcome.seconds:6.1f} s  {step.page}: {step.command[:90]}", flush=True)
                if outcome.code:
                    print(outcome.output[-1500:], flush=True)
    failed = sum(outcome.code != 0 for outcome in outcomes)
    total = time.monotonic() - started
    print(f"{len(outcomes)} commands, {failed} failed, {total / 60:.1f} minutes")
    if arguments.json:
        rows = [{**vars(outcome.step), "seconds": outcome.seconds, "code": outcome.code} for outcome in outcomes]
        arguments.json.write_text(json.dumps({"seconds": total, "commands": rows}, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
