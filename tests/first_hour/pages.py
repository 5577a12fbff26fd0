"""The commands and snippets of a page, in the order in which a reader meets them.

    steps = read_steps(Path("README.md"), Path("scripts"))

A page has three kinds: the commands of ```bash blocks, which may span lines; ```python blocks, which become a file that
a command runs; and the commands in the cells of a table, written as `clearhead ...`.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PARTS = re.compile(r"^```(\w*)\n(.*?)^```$|^\|([^\n]*)\|$", re.DOTALL | re.MULTILINE)
_TABLE_COMMAND = re.compile(r"`(clearhead [^`|]+)`")
SKIPPED = {
    "make test": "it runs the whole test suite, which has its own time",
    "make test-all": "it runs the whole test suite, which has its own time",
    "python -m clearhead.evaluation.harness --model clearhead --model_args model=smollm2,dtype=bfloat16 --tasks sciq "
    "--limit 50": "it needs the large package lm_eval, and its data sets from a hub",
    "pip install lm_eval": "it installs a large package that the other commands do not need",
}


@dataclass(frozen=True)
class Step:
    """One command of a page. A Python snippet is a command that runs a file."""

    page: str
    command: str


def read_steps(page: Path, scripts: Path) -> list[Step]:
    """Return the steps of a page; Python snippets are written to the folder `scripts`."""
    steps = []
    for number, part in enumerate(_PARTS.finditer(page.read_text(encoding="utf-8"))):
        language, text, row = part.groups()
        if row is not None:
            steps += [Step(page.name, command) for command in _TABLE_COMMAND.findall(row)]
        elif language == "bash":
            steps += [Step(page.name, command) for command in split_commands(text)]
        elif language == "python" and "import lm_eval" not in text and "clearhead, lm_eval" not in text:
            script = scripts / f"{page.stem}-{number}.py"
            script.write_text(text, encoding="utf-8")
            steps.append(Step(page.name, f"python {script}"))
    return [step for step in steps if step.command.partition(" #")[0].strip() not in SKIPPED]


def split_commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell script one by one. A command ends with the first line that completes it."""
    lines: list[str] = []
    for line in text.splitlines():
        if not lines and (not line.strip() or line.startswith("#")):
            continue
        lines.append(line)
        if _is_complete("\n".join(lines)):
            yield "\n".join(lines)
            lines = []
    if lines:
        raise ValueError(f"the command does not end: {lines[0]}")


def _is_complete(command: str) -> bool:
    if command.endswith("\\"):
        return False
    checked = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, check=False)
    return checked.returncode == 0 and not checked.stderr  # an open here-document is only a warning
