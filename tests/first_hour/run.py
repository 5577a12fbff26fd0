"""Run every command and snippet of the README and the docs from a bare clone, as a newcomer would type them.

    python -m tests.first_hour.run                       # clone HEAD, then all pages in order; about 15 minutes
    python -m tests.first_hour.run --folder F            # keep the clone, the home folder and the records in F
    python -m tests.first_hour.run --folder F --from docs/training.md    # go on from a page, after an earlier start
    python -m tests.first_hour.run --folder F --pages docs/cost.md       # one page, after an earlier start
    python -m tests.first_hour.run --here                # for a quick look: installs nothing, uses this .venv and home

The home folder is empty at first, so nothing is installed or downloaded beforehand. The commands are typed into one
shell in a pseudo-terminal, so a page may use what an earlier command wrote. A command that several pages show is typed
once. F/first_hour.log gets what the commands print, F/times.json their times, both step by step. The script ends with
a table of the elapsed time and the processor time of each command, those of earlier starts included. It exits with 1
if a command failed or showed a traceback, or if all together took longer than MAX_MINUTES.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.first_hour.pages import Step, read_steps
from tests.first_hour.record import Record, Row
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
    "docs/tutorials/serve-and-look.md",
)
MAX_MINUTES = 20
_PROMPT = r"(?m)^(>|you).{0,3}$"
_ANSWERS = {
    "clearhead chat": [Answer(_PROMPT, "What is the capital of France?\r"), Answer(_PROMPT, "\x04")],
    "clearhead serve": [Answer("Ctrl-C ends the server", "\x03")],
}
_PROBLEMS = re.compile(r"Traceback \(most recent call last\)|Segmentation fault|command not found")
_SHELL_STATE = ("source ", "cd ", "export ")  # what a later start must type again


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


def succeeded(outcome: Outcome) -> bool:
    """Return whether a command ended with 0 and printed no traceback."""
    return outcome.code == 0 and not _PROBLEMS.search(outcome.output)


def run_step(terminal: Terminal, step: Step, record: Record) -> None:
    """Run a step, with answers if it asks questions; record it and print one line about it."""
    answers = next((answers for start, answers in _ANSWERS.items() if step.command.startswith(start)), ())
    outcome = terminal.run(step.command, answers)
    row = Row(step.page, step.command, outcome.seconds, outcome.cpu_seconds, succeeded(outcome))
    record.add(row, visible_text(outcome.output))
    print(row, flush=True)
    if not row.succeeded:
        print(visible_text(outcome.output)[-3000:], f"\n(exit code {outcome.code})", flush=True)


def new_steps(pages: Sequence[Path], scripts: Path) -> Iterator[Step]:
    """Yield the steps of pages in order, without those that an earlier page or line has too.

    scripts: the folder to which Python snippets are written.
    """
    typed: set[str] = set()
    for step in (step for page in pages for step in read_steps(page, scripts)):
        command = step.command.partition("  #")[0].strip()
        if command not in typed:
            typed.add(command)
            yield step


def run_pages(
    pages: Sequence[Path], chosen: Sequence[str], folder: Path, environment: dict[str, str], record: Record
) -> None:
    """Run the steps of the chosen pages in one shell that starts in `folder`, which has what earlier pages wrote."""
    scripts = record.folder / "scripts"
    scripts.mkdir(exist_ok=True)
    with Terminal(folder, environment) as terminal:
        for step in new_steps(pages, scripts):
            if step.page in chosen:
                run_step(terminal, step, record)
            elif step.command.startswith(_SHELL_STATE):
                terminal.run(step.command)


def run_here(pages: Sequence[str], record: Record) -> None:
    """Run pages in a temporary folder with the .venv and the home folder of this checkout; skip what installs."""
    work = record.folder / "clearhead"
    work.mkdir(exist_ok=True)
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    scripts = record.folder / "scripts"
    scripts.mkdir(exist_ok=True)
    with Terminal(work, {**os.environ, "PATH": path, "LANG": "C.UTF-8"}) as terminal:
        for step in new_steps([ROOT / page for page in pages], scripts):
            if not step.command.startswith(("make ", "source ", "pip ")):
                run_step(terminal, step, record)


def run_in_clone(chosen: Sequence[str], record: Record) -> None:
    """Run pages in a clone with a home folder of its own, both of which an earlier start may have left."""
    checkout, home = record.folder / "clearhead", record.folder / "home"
    home.mkdir(exist_ok=True)
    if checkout.exists():
        subprocess.run(["git", "-C", str(checkout), "pull", "--quiet", "--ff-only"], check=True)
    else:
        clone(checkout)
    pages = [checkout / page for page in PAGES]
    names = [Path(page).name for page in chosen]
    run_pages(pages, names, checkout, newcomer_environment(home), record)


def main() -> int:
    """Run the pages and print the result; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true", help="install nothing; use the .venv of this checkout")
    parser.add_argument("--folder", type=Path, help="where to work, and to go on later; a temporary folder by default")
    parser.add_argument("--pages", nargs="*", choices=PAGES, default=PAGES, metavar="PAGE", help="only these pages")
    parser.add_argument("--from", dest="first", choices=PAGES, metavar="PAGE", help="this page and all after it")
    options = parser.parse_args()
    chosen = PAGES[PAGES.index(options.first) :] if options.first else options.pages
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(folder)
        (run_here if options.here else run_in_clone)(chosen, record)
        print(record.table())
    seconds = sum(row.seconds for row in record.rows)
    if seconds > MAX_MINUTES * 60:
        print(f"this is more than {MAX_MINUTES} minutes")
    return 0 if all(row.succeeded for row in record.rows) and seconds <= MAX_MINUTES * 60 else 1


if __name__ == "__main__":
    sys.exit(main())
