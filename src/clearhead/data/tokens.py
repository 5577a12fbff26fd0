"""Store a long sequence of token ids, in memory or in files, with the start of each of its documents.

tokens = Tokens.from_documents(document_ids(text, tokenizer) for text in texts)
train, validation = tokens.split(0.1)
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.data.counter_random import Ids
from clearhead.errors import ClearheadError
from clearhead.tokenization import Tokenizer

StoredIds = NDArray[np.unsignedinteger[Any]]


class Tokens:
    """The ids from index `first` up to `last` of several concatenated arrays. Memory-mapped arrays stay on disk."""

    def __init__(
        self,
        parts: Sequence[StoredIds],
        document_starts: Ids,
        first: int = 0,
        last: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Hold token ids. With `vocab_size`, which ids from files need, they are checked when they are read."""
        self._parts = list(parts)
        self._part_starts = np.cumsum([0, *(len(part) for part in parts)])
        self._document_starts = document_starts
        self._first, self._vocab_size = first, vocab_size
        self._last = int(self._part_starts[-1]) if last is None else last

    @staticmethod
    def from_documents(documents: Iterable[Sequence[int]]) -> "Tokens":
        """Return the ids of all documents, kept in memory."""
        arrays = [np.asarray(document, dtype=np.uint32) for document in documents]
        lengths = [len(array) for array in arrays]
        ids = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
        return Tokens([_compact(ids)], np.cumsum([0, *lengths])[:-1])

    def __len__(self) -> int:
        return self._last - self._first

    def read(self, start: int, count: int) -> Ids:
        """Return `count` ids from index `start` of this range."""
        assert 0 <= start <= start + count <= len(self)
        start += self._first
        pieces = []
        part = int(np.searchsorted(self._part_starts, start, side="right")) - 1
        while count > 0:
            offset = start - int(self._part_starts[part])
            piece = self._parts[part][offset : offset + count]
            pieces.append(piece)
            start, count, part = start + len(piece), count - len(piece), part + 1
        ids = np.concatenate([np.empty(0, np.int64), *pieces], dtype=np.int64)
        if self._vocab_size is not None and ids.size and ids.max() >= self._vocab_size:
            raise ClearheadError(
                f"the token shards contain the id {ids.max()}, but their vocabulary has {self._vocab_size} tokens;"
                " `clearhead shards verify` names the damaged file"
            )
        return ids

    def documents(self) -> tuple[Ids, Ids]:
        """Return the start and the length of each document. `split` may have cut the first and the last one."""
        inside = (self._document_starts > self._first) & (self._document_starts < self._last)
        starts = np.unique(np.concatenate([[self._first], self._document_starts[inside]]))
        return starts - self._first, np.diff(np.append(starts, self._last))

    def split(self, share: float) -> tuple["Tokens", "Tokens"]:
        """Return two ranges: all ids except the last `share` of them, and these last ids."""
        border = self._first + int(len(self) * (1 - share))
        return (
            Tokens(self._parts, self._document_starts, self._first, border, self._vocab_size),
            Tokens(self._parts, self._document_starts, border, self._last, self._vocab_size),
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a memory-mapped file by its name, so that workers that are not forked do not receive its content."""
        parts = [(part.filename, part.dtype) if isinstance(part, np.memmap) else part for part in self._parts]
        return {**self.__dict__, "_parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._parts = [
            np.memmap(part[0], part[1], mode="r") if isinstance(part, tuple) else part for part in state["_parts"]
        ]


def document_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a document and append the end-of-text token if the tokenizer has one and did not add it."""
    ids = tokenizer.encode(text)
    if tokenizer.eos_id is not None and ids[-1:] != [tokenizer.eos_id]:
        ids.append(tokenizer.eos_id)
    return ids


def _compact(ids: NDArray[np.uint32]) -> StoredIds:
    """Return the ids in two bytes each if all of them fit."""
    return ids.astype(np.uint16) if len(ids) and ids.max() < 2**16 else ids
