"""Measure part by part: report the progress, and keep finished parts, so that an interrupted measurement continues.

    parts = MeasuredParts("cpu", ["float32"], num_parts=2); fields = parts.measure("bandwidth", measure_bandwidth)

Every finished part is written to a file beside the calibration. The next measurement of the same machine with the same
torch takes it from there; `finish` deletes the file.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from clearhead.costs.calibration.rates import calibration_path, machine_name
from clearhead.errors import ClearheadError
from clearhead.files import read_json_object, write_text

ShowProgress = Callable[[str, int, int], object]  # the part that is measured next, finished parts, all parts
Fields = dict[str, Any]  # fields of a Calibration as JSON data


class MeasuredParts:
    """The finished parts of a measurement, by name."""

    def __init__(
        self, device: str, dtypes: Sequence[str], num_parts: int, show_progress: ShowProgress = lambda *progress: None
    ) -> None:
        path = calibration_path(device)
        self.path = path.with_name(f"{path.stem}-unfinished.json")
        self.key = {"machine": machine_name(device), "torch": torch.__version__, "dtypes": list(dtypes)}
        self.num_parts = num_parts
        self.show_progress = show_progress
        self.num_done = 0
        self.finished: dict[str, Fields] = self._load()

    def _load(self) -> dict[str, Fields]:
        """Return the parts in the file, or none if it is missing, damaged or of another machine."""
        try:
            data = read_json_object(self.path) if self.path.is_file() else {}
        except ClearheadError:
            return {}
        parts = data.get("parts") if data.get("key") == self.key else None
        return parts if isinstance(parts, dict) else {}

    def measure(self, name: str, measure: Callable[[], Fields]) -> Fields:
        """Return the fields of one part: those of an interrupted measurement, or measured now and saved."""
        self.show_progress(name, self.num_done, self.num_parts)
        if name not in self.finished:
            self.finished[name] = json.loads(json.dumps(measure(), default=asdict))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps({"key": self.key, "parts": self.finished}))
        self.num_done += 1
        return self.finished[name]

    def finish(self) -> None:
        """Delete the file: the measurement is complete."""
        self.path.unlink(missing_ok=True)
