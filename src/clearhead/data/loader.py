"""Rows of a dataset to batches, without end: shuffled, cut by rank, and to be taken up again anywhere.

    loader = Loader(dataset, batch_size=64, seed=1, num_workers=2)
    for batch, state in loader: ...                 # later: Loader(dataset, 64, seed=1).resume(state)

The epochs, each in an order of its own, form one endless sequence of rows. Batch n is rows n · batch_size onwards of
it, across the border of two epochs too, and rank r of w has the r-th of its w equal parts. So a batch is a function of
its number: any number of workers makes the same ones, and to resume is to start at another number.
"""

import hashlib
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, product
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from clearhead.data.batch import IGNORED, Batch
from clearhead.data.counter_random import Ids, Numbers, row_keys, shuffled
from clearhead.errors import ClearheadError

POOLED_BATCHES = 64  # rows of alike length are sought among these many batches: little padding, much chance


class Dataset(Protocol):
    """Rows by number, made into batches."""

    @property
    def lengths(self) -> NDArray[np.int64] | None:
        """Tokens of each row where rows differ, for batches of rows that are alike; None: all are equal."""

    def __len__(self) -> int:
        """The rows of one epoch."""

    def batch(self, rows: Ids, keys: Numbers) -> Batch:
        """These rows. Whatever is left to chance is drawn from the key of each, and from nothing else."""


class Loader:
    """Endless pairs of a batch and the state after it."""

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
        """`batch_size`: the rows of all ranks together."""
        if batch_size < 1 or batch_size % world_size:
            raise ClearheadError(f"batch_size is {batch_size}; it must be a multiple of the {world_size} processes")
        if len(dataset) < 1:
            raise ClearheadError("the dataset has no rows to train on")
        self._batches = _Batches(dataset, batch_size, seed, rank, world_size)
        self._num_workers = num_workers
        self._num_rows, self._batch_size = len(dataset), batch_size
        self._identity = {
            "seed": seed,
            "batch_size": batch_size,
            "num_rows": len(dataset),
            "sample": sample_digest(dataset),
        }
        self._next = 0

    def __iter__(self) -> Iterator[tuple[Batch, dict[str, Any]]]:
        batches: DataLoader[Batch] = DataLoader(
            self._batches,  # type: ignore[arg-type]  # it has no end, and is asked for numbers only
            batch_size=None,
            sampler=count(self._next),
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=_outlive_a_signal,
            generator=torch.Generator(),  # otherwise it draws from torch's own, and dropout would change
        )
        for number, batch in enumerate(batches, start=self._next + 1):
            yield batch, self._state(number)

    def resume(self, state: dict[str, Any]) -> "Loader":
        """Let iteration start with the batch that follows `state`."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ClearheadError(
                    f"the run to resume had {name} {state.get(name)} in its data, this one has {value};"
                    " give the same data, or start a new run"
                )
        self._next = (state["epoch"] * self._num_rows + state["row"]) // self._batch_size
        return self

    def _state(self, num_batches: int) -> dict[str, Any]:
        epoch, row = divmod(num_batches * self._batch_size, self._num_rows)
        return {**self._identity, "epoch": epoch, "row": row}


class _Batches:
    """One rank's batches by number; each worker has a copy."""

    def __init__(self, dataset: Dataset, batch_size: int, seed: int, rank: int, world_size: int) -> None:
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._rank, self._share = rank, batch_size // world_size
        self._last_order: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def __getitem__(self, number: int) -> Batch:
        first = number * self._batch_size + self._rank * self._share
        epochs, places = np.divmod(np.arange(first, first + self._share), len(self._dataset))
        orders = [self._order(epoch)[places[epochs == epoch]] for epoch in np.unique(epochs)]
        rows = np.concatenate(orders)
        return self._dataset.batch(rows, row_keys(self._seed, epochs, rows))

    def _order(self, epoch: int) -> Ids:
        if self._last_order[0] != epoch:
            self._last_order = epoch, epoch_order(self._dataset, self._seed, int(epoch), self._batch_size)
        return self._last_order[1]


def epoch_order(dataset: Dataset, seed: int, epoch: int, batch_size: int) -> Ids:
    """All rows once. Where lengths differ, rows of alike length stand together, a batch of them at a time."""
    order = np.argsort(row_keys(seed, epoch, np.arange(len(dataset))), kind="stable")
    if dataset.lengths is None:
        return order
    lead = -epoch * len(dataset) % batch_size  # these rows fill the batch which the epoch before began
    key = row_keys(seed, epoch, len(dataset))  # no row's own
    return np.concatenate([order[:lead], _alike(order[lead:], dataset.lengths, batch_size, key)])


def _alike(order: Ids, lengths: NDArray[np.int64], batch_size: int, key: Numbers) -> Ids:
    pool = batch_size * POOLED_BATCHES
    pools = [order[start : start + pool] for start in range(0, len(order), pool)]
    ordered = np.concatenate([rows[np.argsort(lengths[rows], kind="stable")] for rows in pools] or [order])
    num_whole = len(ordered) // batch_size
    batches = ordered[: num_whole * batch_size].reshape(num_whole, batch_size)
    mixed = batches[shuffled(key, num_whole)]
    return np.concatenate([mixed.reshape(-1), ordered[num_whole * batch_size :]])


def sample_digest(dataset: Dataset) -> str:
    """A few rows in 16 letters: enough to tell another text or another tokenizer, without reading all."""
    rows = np.linspace(0, len(dataset) - 1, num=16, dtype=np.int64)
    batch = dataset.batch(rows, row_keys(0, 0, rows))
    parts = [part for part in (batch.tokens, batch.targets, batch.source) if part is not None]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]


def in_order(
    dataset: Dataset, batch_size: int, *, rank: int = 0, world_size: int = 1, num_parts: int = 1
) -> Iterator[Batch]:
    """Every row once, for evaluation, with the same draws each time; each batch in `num_parts`, one may be smaller.

    Where lengths differ, rows of alike length are together and the batches come in a mixed order, so that the first
    few are a fair sample. All ranks get equally many parts: one that would be empty holds a row of which nothing is
    asked.
    """
    order, starts = np.arange(len(dataset)), np.arange(0, len(dataset), batch_size)
    if dataset.lengths is not None:
        order, starts = np.argsort(dataset.lengths, kind="stable"), starts[shuffled(0, len(starts))]
    for start, part in product(starts, range(num_parts)):
        rows = order[start : start + batch_size][part * world_size + rank :: num_parts * world_size]
        if len(rows):
            yield dataset.batch(rows, row_keys(0, 0, rows))
        else:
            filler = dataset.batch(order[:1], row_keys(0, 0, order[:1]))
            yield replace(filler, targets=torch.full_like(filler.targets, IGNORED))


def _as_it_is(batch: Any) -> Any:
    return batch


def _outlive_a_signal(worker: int) -> None:
    """Who stops a run often signals all its processes, as torchrun does; a worker that dies would end it unsaved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _hear_once)


def _hear_once(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
