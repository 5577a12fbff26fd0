"""The numbers of steps that nobody has looked at yet, and the stop where one of them is none.

    unread = Unread(meter, tokenizer, folder)
    unread.add(step, batch, torch.stack((loss, norm, num_targets))); loss, norm = unread.look()

A look waits for the device, which then waits for the next step: on an H200 that is a twelfth of a step of GPT-2 124M.
So where an update leaves the weights alone by itself when there is nothing finite to learn from (`Learner.can_skip`),
several steps are looked at together, before anything is shown, validated or saved.
"""

import math
from pathlib import Path

from torch import Tensor

from clearhead.data.batch import Batch
from clearhead.tokenization.base import Tokenizer
from clearhead.training.ending import refuse
from clearhead.training.metrics import Meter

MOST_STEPS = 32  # their batches are kept on the device until then, to be written down if need be


class Unread:
    def __init__(self, meter: Meter, tokenizer: Tokenizer, folder: Path):
        self.meter, self.tokenizer, self.folder = meter, tokenizer, folder
        self.steps: list[tuple[int, Batch, Tensor]] = []
        self.last = (math.nan, math.nan)

    def add(self, step: int, batch: Batch, numbers: Tensor) -> None:
        """numbers (3,): loss, length of the gradient, number of targets."""
        if len(self.steps) == MOST_STEPS:
            self.look()
        self.steps.append((step, batch, numbers))

    def look(self) -> tuple[float, float]:
        """Loss and length of the gradient at the last step; stops at the first step where one is not finite."""
        for step, batch, numbers in self.steps:
            loss, norm, num_targets = numbers.tolist()
            refuse(step, loss, norm, batch, self.tokenizer, self.folder)
            self.meter.count(int(num_targets))
            self.last = loss, norm
        self.steps.clear()
        return self.last
