"""Read training runs for the page: their metrics and samples, while they run or afterwards.

runs = TrainingRuns(Path("runs")); runs.summaries(); runs.metrics("capitals", after_step=200)
"""

import json
import math
from pathlib import Path
from typing import Any

from clearhead.errors import ClearheadError, quote

_METRICS_FILE, _SAMPLE_FILE = "metrics.jsonl", "sample.txt"
_MAX_ROWS = 2000  # per answer: more than a chart has pixels
_MAX_BYTES = 64 << 20  # largest metrics.jsonl
_MAX_SAMPLE = 20_000  # characters


class TrainingRuns:
    """The runs in a folder: every folder in it that has a metrics.jsonl, and the folder itself if it has one."""

    def __init__(self, folder: Path):
        self._folder = folder

    def summaries(self) -> list[dict[str, Any]]:
        """Return name, last step, last losses and the time of the last change of every run, newest first."""
        rows = []
        for name, folder in self._find().items():
            metrics = _read_rows(folder)
            last = {key: value for row in metrics[-50:] for key, value in row.items()}
            changed = (folder / _METRICS_FILE).stat().st_mtime
            rows.append({"name": name, "changed": changed, "num_rows": len(metrics), "last": last})
        return sorted(rows, key=lambda row: -row["changed"])

    def metrics(self, name: str, after_step: int) -> dict[str, Any]:
        """Return the rows of a run after a step, thinned out if they are many, and its samples."""
        folder = self._find().get(name)
        if folder is None:
            raise ClearheadError(f"there is no run {quote(name)}; ask for the list of runs again")
        rows = [row for row in _read_rows(folder) if row["step"] > after_step]
        every = -(-len(rows) // _MAX_ROWS) or 1
        kept = [row for number, row in enumerate(rows) if (len(rows) - 1 - number) % every == 0]
        sample = folder / _SAMPLE_FILE
        text = sample.read_text(encoding="utf-8", errors="replace")[:_MAX_SAMPLE] if sample.is_file() else None
        return {"name": name, "rows": kept, "sample": text}

    def _find(self) -> dict[str, Path]:
        """Return the folders of all runs by name. A name from outside is only looked up here, never made a path."""
        if not self._folder.is_dir():
            raise ClearheadError("the folder of training runs does not exist; start the server with another one")
        folders = [self._folder, *sorted(path for path in self._folder.iterdir() if path.is_dir())]
        return {path.name: path for path in folders if (path / _METRICS_FILE).is_file()}


def _read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that are objects of numbers with a step; skip the others."""
    path = folder / _METRICS_FILE
    with path.open("rb") as file:
        lines = file.read(_MAX_BYTES).split(b"\n")
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(
                {key: value for key, value in row.items() if type(value) in (int, float) and math.isfinite(value)}
            )
    return rows
