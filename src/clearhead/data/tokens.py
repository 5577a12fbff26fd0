"""A long row of token ids, in memory or in files, and where its documents begin.

tokens = Tokens.of(document_ids(text, tokenizer) for text in texts)
train, validation = tokens.split(0.1)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.data.counter_random import Ids
from clearhead.tokenization import Tokenizer

Stored = NDArray[np.unsignedinteger[Any]]


class Tokens:
    """The ids from `first` up to `last` of several arrays in a row; memory-mapped arrays stay on disk."""

    def __init__(self, parts: Sequence[Stored], document_starts: Ids, first: int = 0, last: int | None = None) -> None:
        self._parts = list(parts)
        self._part_starts = np.cumsum([0, *(len(part) for part in parts)])
        self._document_starts = document_starts
        self._first = first
        self._last = int(self._part_starts[-1]) if last is None else last

    @staticmethod
    def of(documents: Iterable[Sequence[int]]) -> "Tokens":
        kept = [np.asarray(document, dtype=np.uint32) for document in documents]
        lengths = [len(document) for document in kept]
        joined = np.concatenate(kept) if kept else np.empty(0, np.uint32)
        return Tokens([smallest(joined)], np.cumsum([0, *lengths])[:-1])

    def __len__(self) -> int:
        return self._last - self._first

    def read(self, start: int, count: int) -> Ids:
        """`count` ids from `start`, counted from the first of these."""
        assert 0 <= start <= start + count <= len(self)
        start += self._first
        pieces = []
        part = int(np.searchsorted(self._part_starts, start, side="right")) - 1
        while count > 0:
            offset = start - int(self._part_starts[part])
            piece = self._parts[part][offset : offset + count]
            pieces.append(piece)
            start, count, part = start + len(piece), count - len(piece), part + 1
        return np.concatenate([np.empty(0, np.int64), *pieces], dtype=np.int64)

    def documents(self) -> tuple[Ids, Ids]:
        """Start and length of each document; the one at either end may have been cut by `split`."""
        inside = (self._document_starts > self._first) & (self._document_starts < self._last)
        starts = np.unique(np.concatenate([[self._first], self._document_starts[inside]]))
        return starts - self._first, np.diff(np.append(starts, self._last))

    def split(self, share: float) -> tuple["Tokens", "Tokens"]:
        """All but the last `share` of the ids, and these."""
        border = self._first + int(len(self) * (1 - share))
        return (
            Tokens(self._parts, self._document_starts, self._first, border),
            Tokens(self._parts, self._document_starts, border, self._last),
        )

    def __getstate__(self) -> dict[str, Any]:
        """For workers that do not inherit memory: a mapped file goes to them by its name, not by its content."""
        parts = [(part.filename, part.dtype) if isinstance(part, np.memmap) else part for part in self._parts]
        return {**self.__dict__, "_parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts = [
            np.memmap(part[0], part[1], mode="r") if isinstance(part, tuple) else part for part in state["_parts"]
        ]


def document_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """A document as a model reads it, and the end of text where the tokenizer has one."""
    ids = tokenizer.encode(text)
    if tokenizer.eos_id is not None and ids[-1:] != [tokenizer.eos_id]:
        ids.append(tokenizer.eos_id)
    return ids


def smallest(ids: NDArray[np.uint32]) -> Stored:
    """In two bytes each where the largest allows it."""
    return ids.astype(np.uint16) if len(ids) and ids.max() < 2**16 else ids
