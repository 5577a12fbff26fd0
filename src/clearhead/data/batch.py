"""The one thing that flows from data to training.

batch = Batch(tokens=ids[:, :-1], targets=ids[:, 1:])   # a language model: the shift by one
loss = cross_entropy(network(batch.tokens), batch.targets, ignore_index=IGNORED)
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

IGNORED = -100  # torch.nn.functional.cross_entropy's own default of ignore_index


@dataclass(frozen=True)
class Batch:
    """Rows of equal length. B rows, T tokens of the side that answers, S tokens of the encoder's side."""

    tokens: Tensor  # (B, T) what the network reads: the decoder's side, or the only one
    targets: Tensor  # (B, T) what it should say at each place; IGNORED where nothing is asked
    mask: Tensor | None = None  # (B, T) True: a real token; None: no padding
    documents: Tensor | None = None  # (B, T) the number of the packed document, for the document mask
    positions: Tensor | None = None  # (B, T) restarting in each packed document
    source: Tensor | None = None  # (B, S) the encoder's side
    source_mask: Tensor | None = None  # (B, S) True: a real token; None: no padding

    def to(self, device: torch.device | str) -> "Batch":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})

    @property
    def real(self) -> Tensor | None:
        """(B, T) True: a token of some text; None: all are. In packed rows only the filler is asked for nothing."""
        return self.mask if self.documents is None else self.targets != IGNORED

    @property
    def num_targets(self) -> int:
        """How many tokens are asked for: what a loss summed over the batch is divided by."""
        return int((self.targets != IGNORED).sum())
