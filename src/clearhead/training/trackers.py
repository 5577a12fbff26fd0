"""Send the metrics of a run to TensorBoard, Weights & Biases or trackio.

tracker = open_tracker("tensorboard", folder, "clearhead", {"train": {"steps": 100}}, first_step=0)
tracker.log({"loss": 2.5}, step=10)
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from clearhead.errors import ClearheadError

_EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}  # extra of pyproject.toml that installs it


class Tracker(Protocol):
    """Where a run logs, besides metrics.jsonl."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Log numbers by name."""

    def close(self) -> None:
        """Finish the log."""


def open_tracker(kind: str, folder: Path, project: str, recipe: dict[str, Any], first_step: int) -> Tracker | None:
    """Return the tracker of a run, or None for the kind "none". Raise ClearheadError if it is not installed.

    A resumed run continues the log of the same run, which is named after its folder.
    """
    match kind:
        case "none":
            return None
        case "tensorboard":
            return _TensorBoard(folder, first_step)
        case _:
            return _ExperimentTracker(_import(kind, kind), folder, project, recipe)


def _import(module: str, kind: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ClearheadError(
            f'{kind} is not installed; run: pip install "clearhead[{_EXTRAS[kind]}]", or set train.tracker to none'
        ) from None


class _TensorBoard:
    """Writes event files into the folder of the run."""

    def __init__(self, folder: Path, first_step: int) -> None:
        module = _import("torch.utils.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _ExperimentTracker:
    """Weights & Biases, or trackio, which has the same functions."""

    def __init__(self, module: Any, folder: Path, project: str, recipe: dict[str, Any]) -> None:
        options = {"project": project, "name": folder.name, "config": recipe, "resume": "allow"}
        if module.__name__ == "wandb":
            options |= {"id": folder.name, "dir": str(folder)}
        self._run = module.init(**options)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()
