"""Datasets: what a loader asks for batches by row number.

Windows(tokens, context=256, reader=CausalReader())   # anywhere in a long text, elsewhere in each epoch
Chunks(tokens, context=256, reader=CausalReader())    # the same text cut once, end to end
Packed(tokens, context=256)                           # several documents in a row, each for itself
Examples(rows, pad_id=0, context=256)                 # rows of unequal length: pairs and chats
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.counter_random import Ids, Numbers
from clearhead.data.packing import cut, pack
from clearhead.data.readers import Reader
from clearhead.data.tokens import Tokens
from clearhead.errors import ClearheadError


class Windows:
    """Rows that start anywhere. An epoch has as many as the text has contexts."""

    lengths = None

    def __init__(self, tokens: Tokens, context: int, reader: Reader) -> None:
        self._row_length = _row_length(tokens, context, reader)
        self._tokens, self._reader = tokens, reader
        self._num_rows = (len(tokens) - reader.num_extra) // context

    def __len__(self) -> int:
        return self._num_rows

    def batch(self, rows: Ids, keys: Numbers) -> Batch:
        starts = keys % np.uint64(len(self._tokens) - self._row_length + 1)
        return self._reader.read(_read_rows(self._tokens, starts.astype(np.int64), self._row_length), keys)


class Chunks:
    """Rows end to end; what is left at the end and fills no row is not read."""

    lengths = None

    def __init__(self, tokens: Tokens, context: int, reader: Reader) -> None:
        self._row_length = _row_length(tokens, context, reader)
        self._tokens, self._context, self._reader = tokens, context, reader

    def __len__(self) -> int:
        return (len(self._tokens) - self._reader.num_extra) // self._context

    def batch(self, rows: Ids, keys: Numbers) -> Batch:
        return self._reader.read(_read_rows(self._tokens, rows * self._context, self._row_length), keys)


class Packed:
    """Documents side by side, for a causal model. None sees another; positions start anew in each.

    What is left of a row is a document of its own of which nothing is asked, so that no mask is needed.
    """

    lengths = None

    def __init__(self, tokens: Tokens, context: int) -> None:
        self._tokens, self._context = tokens, context
        self._pieces = cut(*tokens.documents(), context)
        rows = pack(self._pieces.lengths, context)
        if not rows:
            raise ClearheadError("the corpus has no document of two tokens or more")
        self._order = np.concatenate([np.array(row) for row in rows])
        self._row_starts = np.cumsum([0, *(len(row) for row in rows)])

    def __len__(self) -> int:
        return len(self._row_starts) - 1

    def batch(self, rows: Ids, keys: Numbers) -> Batch:
        shape = len(rows), self._context
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        targets, documents = np.full(shape, IGNORED), np.zeros(shape, np.int64)
        for line, row in enumerate(rows):
            start = 0
            pieces = self._order[self._row_starts[row] : self._row_starts[row + 1]]
            for number, piece in enumerate(pieces):
                length = int(self._pieces.lengths[piece])
                ids = self._tokens.read(int(self._pieces.starts[piece]), length + 1)
                place = line, slice(start, start + length)
                tokens[place], targets[place] = ids[:-1], ids[1:]
                documents[place] = number
                positions[place] = np.arange(length)
                start += length
            documents[line, start:] = len(pieces)
            positions[line, start:] = np.arange(self._context - start)
        return Batch(
            tokens=torch.from_numpy(tokens),
            targets=torch.from_numpy(targets),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
        )


@dataclass(frozen=True)
class Example:
    """What a decoder reads and is asked for, and what its encoder reads, if there is one."""

    tokens: Sequence[int]
    targets: Sequence[int]
    source: Sequence[int] | None = None

    @property
    def length(self) -> int:
        """Of the longer side: batches by it are 91 % full on Multi30k, by the sum of both 80 %."""
        return max(len(self.tokens), len(self.source or ()))


class Examples:
    """Rows of unequal length, held in memory; a batch is as long as its longest. All have a source, or none."""

    def __init__(self, examples: Iterable[Example], pad_id: int, context: int) -> None:
        """Examples longer than `context` are left out, and counted in `num_left_out`."""
        given = list(examples)
        kept = [example for example in given if example.length <= context]
        if not kept:
            shortest = min((example.length for example in given), default=0)
            raise ClearheadError(
                f"none of the {len(given)} examples fits the context of {context} tokens; the shortest has {shortest}"
            )
        self.num_left_out = len(given) - len(kept)
        self.lengths: NDArray[np.int64] = np.array([example.length for example in kept])
        self._tokens = _Ragged([example.tokens for example in kept], pad_id)
        self._targets = _Ragged([example.targets for example in kept], IGNORED)
        self._sources = None
        if kept[0].source is not None:
            self._sources = _Ragged([example.source or () for example in kept], pad_id)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Ids, keys: Numbers) -> Batch:
        tokens, mask = self._tokens.pad(rows)
        targets, _ = self._targets.pad(rows)
        if self._sources is None:
            return Batch(tokens=tokens, targets=targets, mask=mask)
        source, source_mask = self._sources.pad(rows)
        return Batch(tokens=tokens, targets=targets, mask=mask, source=source, source_mask=source_mask)


class _Ragged:
    """Lists of ids in one array."""

    def __init__(self, lists: Sequence[Sequence[int]], filler: int) -> None:
        lengths = np.array([len(ids) for ids in lists])
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._values = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in lists])
        self._filler = filler

    def pad(self, rows: Ids) -> tuple[Tensor, Tensor | None]:
        """(B, T) ids and the mask of the real ones, None where all are; padding stands behind."""
        starts = self._starts[rows]
        lengths = self._ends[rows] - starts
        places = np.arange(lengths.max())
        real = places < lengths[:, None]
        ids = np.full(real.shape, self._filler, dtype=np.int64)
        ids[real] = self._values[(starts[:, None] + places)[real]]
        return torch.from_numpy(ids), None if real.all() else torch.from_numpy(real)


def _row_length(tokens: Tokens, context: int, reader: Reader) -> int:
    needed = context + reader.num_extra
    if len(tokens) < needed:
        raise ClearheadError(f"the text has {len(tokens)} tokens; a row of context {context} takes {needed}")
    return needed


def _read_rows(tokens: Tokens, starts: Ids, length: int) -> Ids:
    return np.stack([tokens.read(start, length) for start in starts.tolist()])
