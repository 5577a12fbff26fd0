"""Turn rows of a long text into batches, with one class for each objective.

    CausalReader().read(ids, keys)     # ids (B, context + 1)

A reader takes rows of `context + num_extra` ids and one random key for each row.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from clearhead.data.batch import Batch
from clearhead.data.counter_random import Ids, Keys
from clearhead.data.objectives import causal, masked, span_corruption, translation


class Reader(Protocol):
    """Turns rows of ids into a batch."""

    @property
    def num_extra(self) -> int:
        """Number of ids that a row needs beyond its context."""

    def read(self, ids: Ids, keys: Keys) -> Batch:
        """Return the batch of these rows (B, context + num_extra). All randomness comes from the keys (B,)."""


@dataclass(frozen=True)
class CausalReader:
    """Predict the next token."""

    num_extra: ClassVar[int] = 1

    def read(self, ids: Ids, keys: Keys) -> Batch:
        inputs, targets = causal(ids)
        return Batch(tokens=torch.from_numpy(inputs), targets=torch.from_numpy(targets))


@dataclass(frozen=True)
class MaskedReader:
    """Predict masked tokens."""

    mask_id: int
    vocab_size: int
    special_ids: frozenset[int]
    share: float
    num_extra: ClassVar[int] = 0

    def read(self, ids: Ids, keys: Keys) -> Batch:
        inputs, targets = masked(ids, keys, self.mask_id, self.vocab_size, self.special_ids, self.share)
        return Batch(tokens=torch.from_numpy(inputs), targets=torch.from_numpy(targets))


@dataclass(frozen=True)
class SpanReader:
    """Give the encoder a text with sentinels in place of spans, and the decoder the spans to predict."""

    sentinels: tuple[int, ...]
    start: int
    end: int
    share: float
    mean_length: float
    num_extra: ClassVar[int] = 0

    def read(self, ids: Ids, keys: Keys) -> Batch:
        sources, answers = zip(
            *(
                span_corruption(row, key, self.sentinels, self.end, self.share, self.mean_length)
                for row, key in zip(ids, keys, strict=True)
            ),
            strict=True,
        )
        pairs = [translation(answer[:-1].tolist(), self.start, self.end) for answer in answers]
        # Rows of equal length hide equally many tokens, so that no padding is needed.
        inputs, targets = torch.tensor(pairs).unbind(dim=1)
        return Batch(tokens=inputs, targets=targets, source=torch.from_numpy(np.stack(sources)))
