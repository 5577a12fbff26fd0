"""What the commands of the pages printed and how long they took, on disk after every command.

record = Record(folder); record.add(Row("README.md", "make demo", 80.0, 60.0, True), "output"); print(record.table())
"""

import json
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One command of a page, and how it ended."""

    page: str
    command: str
    seconds: float
    cpu_seconds: float
    succeeded: bool

    def __str__(self) -> str:
        mark = "ok  " if self.succeeded else "FAIL"
        first_line = self.command.partition("\n")[0][:100]
        return f"{mark} {self.seconds:6.1f} s {self.cpu_seconds:6.1f} CPU s  {self.page}: {first_line}"


class Record:
    """The rows in times.json and the output in first_hour.log, both in a folder that an earlier start may have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "times.json"
        self.rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []

    def add(self, row: Row, output: str) -> None:
        """Write a row, in the place of an earlier one of the same command, and append the output to the log."""
        places = [place for place, old in enumerate(self.rows) if (old.page, old.command) == (row.page, row.command)]
        if places:
            self.rows[places[0]] = row
        else:
            self.rows.append(row)
        text = json.dumps([asdict(row) for row in self.rows], indent=1, ensure_ascii=False)
        (self.folder / "times.json").write_text(text, encoding="utf-8")
        with (self.folder / "first_hour.log").open("a", encoding="utf-8") as log:
            log.write(f"### {row}\n{row.command}\n{output}\n")

    def table(self) -> str:
        """Return all rows, the slowest of each page first, with the sum of each page and of all."""
        lines = ["", "seconds  CPU s"]
        for page, group in groupby(self.rows, key=lambda row: row.page):
            rows = sorted(group, key=lambda row: -row.seconds)
            lines.append(_sum_line(rows, page))
            lines += [f"  {row}" for row in rows]
        failed = sum(not row.succeeded for row in self.rows)
        lines.append(_sum_line(self.rows, f"all {len(self.rows)} commands, {failed} failed"))
        return "\n".join(lines)


def _sum_line(rows: list[Row], name: str) -> str:
    seconds, cpu_seconds = sum(row.seconds for row in rows), sum(row.cpu_seconds for row in rows)
    return f"{seconds:7.1f} {cpu_seconds:6.1f}  {name}: {seconds / 60:.1f} minutes"
