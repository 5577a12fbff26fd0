"""Rows of a long text to batches, one class for each objective that needs nothing but text.

    CausalReader().read(ids, keys)     # ids (B, context + 1)

A reader takes rows of `context + num_extra` ids and a key for each row, from which it draws.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from clearhead.data.batch import Batch
from clearhead.data.counter_random import Ids, Numbers
from clearhead.data.objectives import causal, masked, span_corruption, translation


class Reader(Protocol):
    @property
    def num_extra(self) -> int:
        """Ids that a row needs beyond its context."""

    def read(self, ids: Ids, keys: Numbers) -> Batch: ...


@dataclass(frozen=True)
class CausalReader:
    num_extra: ClassVar[int] = 1

    def read(self, ids: Ids, keys: Numbers) -> Batch:
        inputs, targets = causal(ids)
        return Batch(tokens=torch.from_numpy(inputs), targets=torch.from_numpy(targets))


@dataclass(frozen=True)
class MaskedReader:
    mask_id: int
    vocab_size: int
    special_ids: frozenset[int]
    share: float
    num_extra: ClassVar[int] = 0

    def read(self, ids: Ids, keys: Numbers) -> Batch:
        inputs, targets = masked(ids, keys, self.mask_id, self.vocab_size, self.special_ids, self.share)
        return Batch(tokens=torch.from_numpy(inputs), targets=torch.from_numpy(targets))


@dataclass(frozen=True)
class SpanReader:
    """For an encoder-decoder: the source has the holes, the decoder fills them."""

    sentinels: tuple[int, ...]
    start: int
    end: int
    share: float
    mean_length: float
    num_extra: ClassVar[int] = 0

    def read(self, ids: Ids, keys: Numbers) -> Batch:
        sources, answers = zip(
            *(
                span_corruption(row, key, self.sentinels, self.end, self.share, self.mean_length)
                for row, key in zip(ids, keys, strict=True)
            ),
            strict=True,
        )
        pairs = [translation(answer[:-1].tolist(), self.start, self.end) for answer in answers]
        inputs, targets = torch.tensor(pairs).unbind(dim=1)  # rows of one length hide equally many tokens
        return Batch(tokens=inputs, targets=targets, source=torch.from_numpy(np.stack(sources)))
