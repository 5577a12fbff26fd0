"""Order, ranks, workers and resume: batch n is the same whoever makes it."""

import json
import multiprocessing
import os
import signal
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.batch import Batch
from clearhead.data.loader import POOLED_BATCHES, Loader, epoch_order, in_order
from clearhead.errors import ClearheadError


class Numbered:
    """Rows that say their number and key."""

    def __init__(self, count, lengths=None, first=0):
        self.count, self.lengths, self.first = count, lengths, first

    def __len__(self):
        return self.count

    def batch(self, rows, keys):
        tokens = torch.from_numpy(rows)[:, None] + self.first
        return Batch(tokens=tokens, targets=torch.from_numpy(keys.view(np.int64))[:, None])


def unequal(count):
    return Numbered(count, np.random.default_rng(count).integers(1, 50, count))


def take(loader, count):
    return list(islice(loader, count))


def contents(pairs):
    return [(batch.tokens.tolist(), batch.targets.tolist()) for batch, _ in pairs]


DATASETS = st.builds(lambda count, even: Numbered(count) if even else unequal(count), st.integers(1, 40), st.booleans())


@settings(deadline=None)
@given(DATASETS, st.integers(1, 12), st.integers(0, 2**64 - 1))
def test_every_epoch_is_every_row_once(dataset, batch_size, seed):
    num_batches = -(-3 * len(dataset) // batch_size)
    rows = torch.cat([batch.tokens for batch, _ in take(Loader(dataset, batch_size, seed=seed), num_batches)])
    for epoch in rows[: 3 * len(dataset)].reshape(3, len(dataset)):
        assert sorted(epoch.tolist()) == list(range(len(dataset)))


@settings(deadline=None)
@given(DATASETS, st.integers(1, 12), st.integers(0, 20), st.integers(1, 5))
def test_resume_goes_on_with_the_next_batch(dataset, batch_size, before, after):
    """Up to 40 rows and 300 taken: most cases cross an epoch, many several."""
    straight = take(Loader(dataset, batch_size, seed=3), before + 1 + after)
    state = json.loads(json.dumps(straight[before][1]))
    resumed = take(Loader(dataset, batch_size, seed=3).resume(state), after)
    assert contents(resumed) == contents(straight[before + 1 :])
    assert [state for _, state in resumed] == [state for _, state in straight[before + 1 :]]


@settings(deadline=None)
@given(DATASETS, st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_ranks_together_have_the_batches_of_one_process(dataset, rows_each, world_size):
    batch_size = 4 * rows_each
    alone = take(Loader(dataset, batch_size, seed=1), 6)
    ranks = [
        take(Loader(dataset, batch_size, seed=1, rank=rank, world_size=world_size), 6) for rank in range(world_size)
    ]
    for (whole, state), *shares in zip(alone, *ranks, strict=True):
        assert torch.equal(whole.tokens, torch.cat([batch.tokens for batch, _ in shares]))
        assert torch.equal(whole.targets, torch.cat([batch.targets for batch, _ in shares]))
        assert all(share_state == state for _, share_state in shares)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing_and_resume_among_them(num_workers):
    dataset = unequal(23)
    straight = take(Loader(dataset, 4, seed=5), 14)
    with_workers = take(Loader(dataset, 4, seed=5, num_workers=num_workers), 8)
    assert contents(with_workers) == contents(straight[:8])
    resumed = take(Loader(dataset, 4, seed=5, num_workers=3 - num_workers).resume(with_workers[-1][1]), 6)
    assert contents(resumed) == contents(straight[8:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_outlives_the_signal_that_its_run_is_asked_to_stop_by(number):
    batches = iter(Loader(Numbered(9), 4, num_workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    assert [len(next(batches)[0].tokens) for _ in range(8)] == [4] * 8
    assert worker.is_alive()


def test_torchs_own_randomness_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(Loader(Numbered(5), 2), 3)
    assert torch.equal(torch.rand(3), expected)


def test_a_row_draws_anew_in_every_epoch():
    keys = torch.cat([batch.targets for batch, _ in take(Loader(Numbered(6), 3), 8)])
    assert len(keys.unique()) == 4 * 6


def test_epochs_and_seeds_differ():
    dataset = Numbered(50)
    orders = {tuple(epoch_order(dataset, seed, epoch, 8)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(50)) not in orders


@settings(max_examples=20, deadline=None)
@given(st.integers(200, 400), st.integers(0, 4))
def test_alike_rows_stand_together_in_every_epoch(count, epoch):
    """Beyond the first rows, which end the batch of the epoch before, batches have almost no padding."""
    dataset, batch_size = unequal(count), 8
    assert count < batch_size * POOLED_BATCHES
    lead = -epoch * count % batch_size
    order = epoch_order(dataset, 0, epoch, batch_size)[lead:]
    batches = dataset.lengths[order[: len(order) // batch_size * batch_size]].reshape(-1, batch_size)
    assert (batches.max(axis=1) - batches.min(axis=1)).sum() <= 50  # sorted once: the spreads add up to the range
    assert (np.diff(batches.mean(axis=1)) < 0).any()  # but not from short to long


@settings(deadline=None)
@given(DATASETS, st.integers(1, 12), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 5]))
def test_in_order_every_row_once_and_equally_many_parts(dataset, batch_size, world_size, num_parts):
    many = {"world_size": world_size, "num_parts": num_parts}
    ranks = [list(in_order(dataset, batch_size, rank=rank, **many)) for rank in range(world_size)]
    assert {len(parts) for parts in ranks} == {-(-len(dataset) // batch_size) * num_parts}
    parts = [part for parts in ranks for part in parts]
    rows = [row for part in parts if part.num_targets for row in part.tokens[:, 0].tolist()]
    assert sorted(rows) == list(range(len(dataset)))
    assert max(len(part.tokens) for part in parts) <= -(-batch_size // (world_size * num_parts))


def test_the_first_batches_of_an_evaluation_are_a_fair_sample():
    dataset = unequal(800)
    batches = [dataset.lengths[batch.tokens[:, 0]] for batch in in_order(dataset, 8)]
    assert np.mean([lengths.max() - lengths.min() for lengths in batches]) < 2
    assert abs(np.mean(batches[:25]) - dataset.lengths.mean()) < 8
    equal = [batch.tokens[:, 0].tolist() for batch in in_order(Numbered(5), 2)]
    assert equal == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (Loader(Numbered(10), 4, seed=2), "seed 1"),
        (Loader(Numbered(10), 5, seed=1), "batch_size 4"),
        (Loader(Numbered(11), 4, seed=1), "num_rows 10"),
        (Loader(Numbered(10, first=1), 4, seed=1), "sample "),
    ],
)
def test_another_run_is_not_resumed(loader, what):
    _, state = take(Loader(Numbered(10), 4, seed=1), 3)[-1]
    with pytest.raises(ClearheadError, match=f"the run to resume had {what}"):
        loader.resume(state)


def test_sizes_that_cannot_be():
    with pytest.raises(ClearheadError, match="batch_size is 5; it must be a multiple of the 2 processes"):
        Loader(Numbered(10), 5, world_size=2)
    with pytest.raises(ClearheadError, match="no rows"):
        Loader(Numbered(0), 5)
