"""Run every command and snippet of the README and the docs from a bare clone, as a newcomer would type them.

    python -m tests.first_hour.run                       # clone HEAD, then all pages in order; about 15 minutes
    python -m tests.first_hour.run --pages README.md     # one page, after `make demo`
    python -m tests.first_hour.run --here                # for a quick look: installs nothing, uses this .venv and home

The clone is in a temporary folder and the home folder is empty, so nothing is installed or downloaded beforehand. The
commands are typed into one shell in a pseudo-terminal, so a page may use what an earlier command wrote. The script
prints the elapsed time and the processor time of each command. It exits with 1 if a command fails or shows a traceback,
or if all together take longer than MAX_MINUTES. --out FOLDER keeps what the commands printed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.first_hour.pages import Step, read_steps
from tests.first_hour.terminal import Answer, Outcome, Terminal, visible_text

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/tutorials/first-model.md",
    "docs/guide.md",
    "docs/training.md",
    "docs/tutorials/train-and-open.md",
    "docs/tutorials/attention-to-llama4.md",
    "docs/evaluation.md",
    "docs/cost.md",
    "docs/fast-path.md",
    "docs/engine.md",
    "docs/serving.md",
)
MAX_MINUTES = 20
_PROMPT = r"(?m)^(>|you).{0,3}$"
_ANSWERS = {
    "clearhead chat": [Answer(_PROMPT, "What is the capital of France?\r"), Answer(_PROMPT, "\x04")],
    "clearhead serve": [Answer("Ctrl-C ends the server", "\x03")],
}
_PROBLEMS = re.compile(r"Traceback \(most recent call last\)|Segmentation fault|command not found")


def clone(target: Path) -> None:
    """Clone what is committed in this repository."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)


def newcomer_environment(home: Path) -> dict[str, str]:
    """Return the environment of a user with an empty home folder, who has set up only pip and npm."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "NPM_", "npm_", "SSL_"))}
    settings = {
        "PIP_CONFIG_FILE": Path("~/.config/pip/pip.conf").expanduser(),
        "NPM_CONFIG_USERCONFIG": Path("~/.npmrc").expanduser(),
    }
    kept = {name: str(path) for name, path in settings.items() if path.is_file()} | kept
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if ".venv" not in part)
    return kept | {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "USER": "newcomer"}


def run_step(terminal: Terminal, step: Step) -> Outcome:
    """Run a step, with answers if it asks questions, and print one line about it."""
    answers = next((answers for start, answers in _ANSWERS.items() if step.command.startswith(start)), ())
    outcome = terminal.run(step.command, answers)
    mark = "ok  " if succeeded(outcome) else f"FAIL {outcome.code}"
    first_line = step.command.partition("\n")[0]
    print(
        f"{mark} {outcome.seconds:6.1f} s {outcome.cpu_seconds:6.1f} CPU s  {step.page}: {first_line[:110]}", flush=True
    )
    if not succeeded(outcome):
        print(visible_text(outcome.output)[-3000:], flush=True)
    return outcome


def succeeded(outcome: Outcome) -> bool:
    """Return whether a command ended with 0 and printed no traceback."""
    return outcome.code == 0 and not _PROBLEMS.search(outcome.output)


def run_pages(
    pages: Sequence[Path],
    folder: Path,
    environment: dict[str, str],
    scripts: Path,
    skipped: tuple[str, ...] = (),
    out: Path | None = None,
) -> dict[Step, Outcome]:
    """Run the steps of all pages in one shell that starts in `folder`: each once, and none that begins like `skipped`.

    scripts: the folder to which Python snippets are written. out: the folder for the record, which grows step by step.
    """
    outcomes: dict[Step, Outcome] = {}
    typed: set[str] = set()
    with Terminal(folder, environment) as terminal:
        for step in (step for page in pages for step in read_steps(page, scripts)):
            command = step.command.partition("  #")[0].strip()
            if command in typed or command.startswith(skipped):
                continue
            typed.add(command)
            outcomes[step] = run_step(terminal, step)
            if out is not None:
                write_record(out, outcomes)
    return outcomes


def write_record(folder: Path, outcomes: dict[Step, Outcome]) -> None:
    """Write times and exit codes as JSON, and what the commands printed."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{**vars(step), **_numbers(outcome)} for step, outcome in outcomes.items()]
    (folder / "times.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    texts = [f"### {step.page}: {step.command}\n{visible_text(outcome.output)}\n" for step, outcome in outcomes.items()]
    (folder / "transcript.txt").write_text("".join(texts), encoding="utf-8")


def _numbers(outcome: Outcome) -> dict[str, float]:
    return {"seconds": outcome.seconds, "cpu_seconds": outcome.cpu_seconds, "code": outcome.code}


def main() -> int:
    """Run the pages and print the result; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--here", action="store_true", help="install nothing; use the .venv of this checkout")
    parser.add_argument("--out", type=Path, help="folder for the times and the output of all commands")
    parser.add_argument("--pages", nargs="*", default=PAGES, help="pages to run")
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "home").mkdir()
        (folder / "scripts").mkdir()
        checkout = folder / "clearhead"
        if arguments.here:
            checkout.mkdir()
            path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, "PATH": path, "LANG": "C.UTF-8"}
            skipped = ("make ", "source ", "pip ")
        else:
            clone(checkout)
            environment = newcomer_environment(folder / "home")
            skipped = ()
        pages = [(ROOT if arguments.here else checkout) / page for page in arguments.pages]
        outcomes = run_pages(pages, checkout, environment, folder / "scripts", skipped, arguments.out)
    seconds = time.monotonic() - started
    num_failed = sum(not succeeded(outcome) for outcome in outcomes.values())
    cpu_seconds = sum(outcome.cpu_seconds for outcome in outcomes.values())
    times = f"{seconds / 60:.1f} minutes, {cpu_seconds / 60:.1f} minutes of processor time"
    print(f"{len(outcomes)} commands, {num_failed} failed, {times}")
    if seconds > MAX_MINUTES * 60:
        print(f"this is more than {MAX_MINUTES} minutes")
    return 1 if num_failed or seconds > MAX_MINUTES * 60 else 0


if __name__ == "__main__":
    sys.exit(main())
