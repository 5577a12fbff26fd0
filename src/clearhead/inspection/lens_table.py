"""Predictions of the logit lens, and a table of them to display.

table = LensTable(predictions, token_text=str); table.stages, table.probabilities.shape
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Branch = Literal["attention", "feed_forward"]


@dataclass(frozen=True)
class LensPrediction:
    """The most likely tokens at one depth, for the T requested positions."""

    layer: int
    after: Branch
    top_ids: Tensor  # (T, top)
    top_probabilities: Tensor  # (T, top)
    entropy: Tensor  # (T,) nats


@dataclass(frozen=True)
class LensTable:
    """The logit lens over the last few tokens, with a function that gives the text of a token id."""

    predictions: Sequence[LensPrediction]
    token_text: Callable[[int], str]

    @property
    def stages(self) -> list[str]:
        """The names of the depths, such as "layer 3 feed-forward"."""
        return [f"layer {one.layer} {one.after.replace('_', '-')}" for one in self.predictions]

    @property
    def tokens(self) -> Tensor:
        """The most likely token ids (stages, tokens, top)."""
        return torch.stack([one.top_ids for one in self.predictions]).cpu()

    @property
    def probabilities(self) -> Tensor:
        """The probabilities of these tokens (stages, tokens, top)."""
        return torch.stack([one.top_probabilities for one in self.predictions]).cpu()
