"""Load an endless stream of batches from a dataset: shuffled, divided among ranks, and resumable at any batch.

    loader = Loader(dataset, batch_size=64, seed=1, num_workers=2)
    for batch, state in loader: ...                 # later: Loader(dataset, 64, seed=1).resume(state)

The epochs, each in its own random order, form one endless sequence of rows. Batch n consists of `batch_size` rows from
row n · batch_size of this sequence, also across the end of an epoch. Rank r of w reads the r-th of its w equal parts.
A batch is therefore a function of its number: any number of workers makes the same batches, and resuming means
starting at another number.
"""

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count, product
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.counter_random import Ids, Keys, permutation, row_keys
from clearhead.errors import ClearheadError, quote

POOL_BATCHES = 64  # rows are sorted by length within pools of this many batches: little padding, much randomness


class Dataset(Protocol):
    """Numbered rows that can be read as batches."""

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Number of tokens of each row, for grouping rows of similar length; None if all rows are equally long."""

    def __len__(self) -> int:
        """Number of rows in an epoch."""

    def batch(self, rows: Ids, keys: Keys) -> Batch:
        """Return these rows. All randomness comes from the key of each row."""


class Loader:
    """Yields pairs of a batch and the state after it, without end."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
    ) -> None:
        """`batch_size` is the number of rows of all ranks together."""
        if batch_size < 1 or batch_size % world_size:
            raise ClearheadError(f"batch_size is {batch_size}; it must be a multiple of the {world_size} processes")
        if len(dataset) < 1:
            raise ClearheadError("the dataset has no rows to train on; check the files of [data]")
        self._batches = _NumberedBatches(dataset, batch_size, seed, rank, world_size)
        self._num_workers = num_workers
        self._num_rows, self._batch_size = len(dataset), batch_size
        self._fingerprint = {
            "seed": seed,
            "batch_size": batch_size,
            "num_rows": len(dataset),
            "sample": _sample_digest(dataset),
        }
        self._next = 0

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        batches: DataLoader[Batch] = DataLoader(
            self._batches,  # type: ignore[arg-type]  # it has no length; DataLoader only indexes it
            batch_size=None,
            sampler=count(self._next),
            num_workers=self._num_workers,
            collate_fn=_identity,
            worker_init_fn=partial(_prepare_worker, parent=os.getpid()),
            generator=torch.Generator(),  # the default draws from torch's global generator, which would change dropout
        )
        for number, batch in enumerate(batches, start=self._next + 1):
            yield batch, self._state(number)

    def resume(self, state: dict[str, Any]) -> "Loader":
        """Make iteration start with the batch that follows `state`. Raise ClearheadError if the data differ."""
        for name, value in self._fingerprint.items():
            if state.get(name) != value:
                raise ClearheadError(
                    f"the run to resume had {name} {state.get(name)} in its data, but this one has {value};"
                    " use the same data or start a new run"
                )
        epoch, row = state.get("epoch"), state.get("row")
        if not (isinstance(epoch, int) and isinstance(row, int) and epoch >= 0 and 0 <= row < self._num_rows):
            raise ClearheadError(
                f"the run to resume has read epoch {quote(epoch)} up to row {quote(row)}, which is not possible"
            )
        self._next = (epoch * self._num_rows + row) // self._batch_size
        return self

    def _state(self, num_batches: int) -> dict[str, Any]:
        epoch, row = divmod(num_batches * self._batch_size, self._num_rows)
        return {**self._fingerprint, "epoch": epoch, "row": row}


class _NumberedBatches:
    """The batches of one rank by number. Each worker has a copy."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._rank, self._rank_rows = rank, batch_size // world_size
        self._last_order: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def __getitem__(self, number: int) -> Batch:
        first = number * self._batch_size + self._rank * self._rank_rows
        epochs, indices = np.divmod(np.arange(first, first + self._rank_rows), len(self._dataset))
        rows = np.concatenate([self._order(epoch)[indices[epochs == epoch]] for epoch in np.unique(epochs)])
        return self._dataset.batch(rows, row_keys(self._seed, epochs, rows))

    def _order(self, epoch: int) -> Ids:
        if self._last_order[0] != epoch:
            self._last_order = epoch, epoch_order(self._dataset, self._seed, int(epoch), self._batch_size)
        return self._last_order[1]


def epoch_order(dataset: Dataset, seed: int, epoch: int, batch_size: int) -> Ids:
    """Return all row numbers in the order of an epoch. If lengths differ, each batch has rows of similar length."""
    order = np.argsort(row_keys(seed, epoch, np.arange(len(dataset))), kind="stable")
    if dataset.lengths is None:
        return order
    num_carried = -epoch * len(dataset) % batch_size  # these rows complete the last batch of the previous epoch
    key = row_keys(seed, epoch, len(dataset))  # not the key of any row
    grouped = _group_by_length(order[num_carried:], dataset.lengths, batch_size, key)
    return np.concatenate([order[:num_carried], grouped])


def _group_by_length(order: Ids, lengths: NDArray[np.int64], batch_size: int, key: Keys) -> Ids:
    """Sort pools of rows by length, cut them into batches, and shuffle the batches."""
    pool_size = batch_size * POOL_BATCHES
    pools = [order[start : start + pool_size] for start in range(0, len(order), pool_size)]
    ordered = np.concatenate([rows[np.argsort(lengths[rows], kind="stable")] for rows in pools] or [order])
    num_full = len(ordered) // batch_size
    batches = ordered[: num_full * batch_size].reshape(num_full, batch_size)
    shuffled = batches[permutation(key, num_full)]
    return np.concatenate([shuffled.reshape(-1), ordered[num_full * batch_size :]])


def _sample_digest(dataset: Dataset) -> str:
    """Return a digest of 16 rows, which detects another text or tokenizer without reading everything."""
    rows = np.linspace(0, len(dataset) - 1, num=16, dtype=np.int64)
    batch = dataset.batch(rows, row_keys(0, 0, rows))
    tensors = [tensor for tensor in (batch.tokens, batch.targets, batch.source) if tensor is not None]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def evaluation_batches(
    dataset: Dataset, batch_size: int, *, rank: int = 0, world_size: int = 1, num_parts: int = 1
) -> Iterator[Batch]:
    """Yield every row once, in the same order and with the same randomness each time.

    Each batch comes in `num_parts` parts, whose sizes differ by at most one row. If lengths differ, rows of similar
    length share a batch and the batches are shuffled, so that the first few are a fair sample. All ranks get the same
    number of parts; a part that would be empty holds one row without targets.
    """
    order, starts = np.arange(len(dataset)), np.arange(0, len(dataset), batch_size)
    if dataset.lengths is not None:
        order, starts = np.argsort(dataset.lengths, kind="stable"), starts[permutation(0, len(starts))]
    for start, part in product(starts, range(num_parts)):
        rows = order[start : start + batch_size][part * world_size + rank :: num_parts * world_size]
        if len(rows):
            yield dataset.batch(rows, row_keys(0, 0, rows))
        else:
            filler = dataset.batch(order[:1], row_keys(0, 0, order[:1]))
            yield replace(filler, targets=torch.full_like(filler.targets, IGNORED))


def _identity(batch: Any) -> Any:
    return batch


def _prepare_worker(worker: int, parent: int) -> None:
    """Let a worker ignore the first SIGTERM or SIGINT, and end at once if its run has been killed already.

    Tools such as torchrun signal all processes of a run. A worker that died would end the run before it has saved.
    PyTorch's worker watches the process that is its parent when it starts to watch. A run that is killed before, while
    it starts its workers, would leave one waiting forever.
    """
    if multiprocessing.get_start_method() != "forkserver" and os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _restore_default_handler)


def _restore_default_handler(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
