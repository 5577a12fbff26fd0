"""Abort a run whose loss or gradient is not finite, before the weights change.

abort_if_not_finite(step, loss, gradient_norm, batch, tokenizer, Path("runs/x"))
"""

import math
from pathlib import Path

from clearhead.data import Batch
from clearhead.errors import ClearheadError
from clearhead.files import write_text
from clearhead.tokenization import Tokenizer

_EXCERPT_CHARACTERS = 200


def abort_if_not_finite(
    step: int, loss: float, gradient_norm: float, batch: Batch, tokenizer: Tokenizer, folder: Path, rank: int = 0
) -> None:
    """Raise ClearheadError if the loss or the gradient is not finite.

    Each process writes its part of the batch as text into the run folder.
    """
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return
    path = folder / (f"bad-batch-{step}-{rank}.txt" if rank else f"bad-batch-{step}.txt")
    input_ids = batch.tokens if batch.source is None else batch.source
    target_ids = [[token for token in row if token >= 0] for row in batch.targets.tolist()]
    inputs, targets = (
        [tokenizer.decode(row, skip_special_tokens=False) for row in rows] for rows in (input_ids.tolist(), target_ids)
    )
    rows = (f"input: {one!r}\ntarget: {other!r}\n" for one, other in zip(inputs, targets, strict=True))
    write_text(path, "\n".join(rows))
    raise ClearheadError(
        f"the loss is {loss} and the gradient norm {gradient_norm} at step {step}; the weights were not updated, and "
        f"the last checkpoint is intact. The batch is in {path} and begins with {inputs[0][:_EXCERPT_CHARACTERS]!r}"
    )
