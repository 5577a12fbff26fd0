"""The controls of the course: every state of a slider, computed in advance by the network's own modules.

    widget = make_widgets()["temperature"]; widget.frames[0].values

The page only looks numbers up. The frames are in the order of the controls: the last control changes fastest.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from clearhead.course.parts import NO_MASK, attend_with_scores, inputs, tensor
from clearhead.course.position_examples import rotate
from clearhead.course.training_examples import MASKINGS, masked_weights
from clearhead.model import Scoring, attention_steps

_NUM_MASKED = 6  # tokens of the mask's table, so that it fits a phone
_NUM_KEYS = 16


@dataclass(frozen=True)
class Control:
    """A slider, or a choice if its stops have no order."""

    label: str
    stops: tuple[str, ...]
    start: int  # index of the first stop that is shown
    is_choice: bool = False


@dataclass(frozen=True)
class Frame:
    """What is shown for one combination of stops."""

    values: list[list[float]]  # rows of a grid, one row of bars, or vectors
    note: str


@dataclass(frozen=True)
class Widget:
    """Controls and a frame for each combination of their stops."""

    title: str
    kind: Literal["bars", "grid", "vectors"]
    labels: tuple[str, ...]  # of the bars, of rows and columns, or of the vectors
    controls: tuple[Control, ...]
    frames: list[Frame]

    @property
    def start(self) -> int:
        """The index of the frame that is shown first."""
        index = 0
        for control in self.controls:
            index = index * len(control.stops) + control.start
        return index


@torch.no_grad()
def make_widgets() -> dict[str, Widget]:
    """Compute all widgets by name."""
    return {"temperature": _temperature(), "scaling": _scaling(), "mask": _mask(), "rope": _rope()}


def _temperature() -> Widget:
    row = tensor([inputs("temperature")["row"]])
    stops = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
    frames = []
    for stop in stops:
        weights = attend_with_scores(row, scale=1 / stop).weights[0, 0]
        frames.append(Frame(weights.tolist(), f"T = {stop:g}: the largest weight is {float(weights.max()):.5f}"))
    labels = tuple(f"score {score:g}" for score in row[0].tolist())
    control = Control("Temperature T", tuple(f"{stop:g}" for stop in stops), start=stops.index(1))
    return Widget("Temperature", "bars", labels, (control,), frames)


def _scaling() -> Widget:
    """Show the weights of one query for 16 random keys of width d, largest first."""
    widths = tuple(2**power for power in range(11))
    frames = []
    for is_scaled, width in product((True, False), widths):
        generator = torch.Generator().manual_seed(width)
        q, k = torch.randn(2, 1, 1, _NUM_KEYS, width, generator=generator, dtype=torch.float64)
        steps = attention_steps(q[..., :1, :], k, k, Scoring(NO_MASK, scale=width**-0.5 if is_scaled else 1.0))
        weights = steps.weights[0, 0].sort(descending=True).values
        deviation = float(attention_steps(q, k, k, Scoring(NO_MASK, width**-0.5 if is_scaled else 1.0)).scores.std())
        note = (
            f"d = {width}: scores have a deviation of {deviation:.2f}; the largest weight is {float(weights.max()):.3f}"
        )
        frames.append(Frame(weights.tolist(), note))
    controls = (
        Control("Scores", ("q·k / √d", "q·k"), start=1, is_choice=True),
        Control("Width d", tuple(map(str, widths)), start=6),
    )
    return Widget("Division by √d", "bars", tuple(f"key {n + 1}" for n in range(_NUM_KEYS)), controls, frames)


def _mask() -> Widget:
    scores = tensor(inputs("causal")["scores"])[:_NUM_MASKED, :_NUM_MASKED]
    frames = []
    for masking in MASKINGS:
        weights = masked_weights(scores, masking)
        sums = weights.sum(dim=-1)
        above = float(weights.triu(1).sum())
        note = f"row sums {float(sums.min()):.3f} to {float(sums.max()):.3f}; weight on later tokens {above:.3f}"
        frames.append(Frame(weights.tolist(), note))
    labels = tuple(str(number) for number in range(1, _NUM_MASKED + 1))
    return Widget("Mask", "grid", labels, (Control("Mask", MASKINGS, start=3, is_choice=True),), frames)


def _rope() -> Widget:
    """Show one pair of a query and of a key, rotated by their positions."""
    q, k = tensor([1.0, 0.0]), tensor([0.8, 0.6])
    angles = (1.0, 0.3, 0.1, 0.01)  # radians per position
    positions, distances = range(0, 33, 4), range(17)
    frames = []
    for angle, start, distance in product(angles, positions, distances):
        turned_q, turned_k = (_turn(vector, place, angle) for vector, place in ((q, start + distance), (k, start)))
        score = float(turned_q @ turned_k)
        note = f"query at {start + distance}, key at {start}: q′·k′ = {score:.4f}"
        frames.append(Frame([turned_q.tolist(), turned_k.tolist()], note))
    controls = (
        Control("Frequency ω", tuple(f"{angle:g}" for angle in angles), start=1),
        Control("Position of the key", tuple(map(str, positions)), start=0),
        Control("Distance m − n", tuple(map(str, distances)), start=6),
    )
    return Widget("Rotate query and key", "vectors", ("query", "key"), controls, frames)


def _turn(vector: Tensor, position: int, angle: float) -> Tensor:
    """Rotate a pair by position · angle: as the second pair of a head of width 4, its frequency is θ^(-1/2)."""
    if angle == 1.0:
        return rotate(vector, position)
    return rotate(torch.cat((vector, vector)), position, theta=angle**-2.0)[2:]
