"""Describe what a run produced.

result = train("capitals", "runs/capitals"); result.validation_loss; model = result.load()
"""

from dataclasses import dataclass
from pathlib import Path

from clearhead.api import Model, load


@dataclass(frozen=True)
class TrainingResult:
    """What a run produced."""

    folder: Path  # the model is in its subfolder `model`
    num_steps: int
    loss: float | None  # of the last step; None if the run was already complete
    validation_loss: float | None  # of the last weights, or of the best if the recipe keeps those
    sample: str | None = None  # the first text of sample.txt

    def load(self) -> Model:
        """Load the trained model."""
        return load(self.folder / "model")
