"""Test the order of rows, ranks, workers and resuming: batch n depends on its number only."""

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
from clearhead.data.loader import POOL_BATCHES, Loader, _prepare_worker, epoch_order, evaluation_batches
from clearhead.errors import ClearheadError


class NumberedRows:
    """A dataset whose tokens are the row numbers and whose targets are the keys."""

    def __init__(self, count, lengths=None, first=0):
        self.count, self.lengths, self.first = count, lengths, first

    def __len__(self):
        return self.count

    def batch(self, rows, keys):
        tokens = torch.from_numpy(rows)[:, None] + self.first
        return Batch(tokens=tokens, targets=torch.from_numpy(keys.view(np.int64))[:, None])


def rows_of_unequal_length(count):
    return NumberedRows(count, np.random.default_rng(count).integers(1, 50, count))


def take(loader, count):
    return list(islice(loader, count))


def contents(pairs):
    return [(batch.tokens.tolist(), batch.targets.tolist()) for batch, _ in pairs]


DATASETS = st.builds(
    lambda count, even: NumberedRows(count) if even else rows_of_unequal_length(count),
    st.integers(1, 40),
    st.booleans(),
)


@settings(deadline=None)
@given(DATASETS, st.integers(1, 12), st.integers(0, 2**64 - 1))
def test_every_epoch_contains_every_row_once(dataset, batch_size, seed):
    num_batches = -(-3 * len(dataset) // batch_size)
    rows = torch.cat([batch.tokens for batch, _ in take(Loader(dataset, batch_size, seed=seed), num_batches)])
    for epoch in rows[: 3 * len(dataset)].reshape(3, len(dataset)):
        assert sorted(epoch.tolist()) == list(range(len(dataset)))


@settings(deadline=None)
@given(DATASETS, st.integers(1, 12), st.integers(0, 20), st.integers(1, 5))
def test_resume_continues_with_the_next_batch(dataset, batch_size, before, after):
    """With up to 40 rows in a dataset and 300 read, most cases cross the end of an epoch, many more than one."""
    straight = take(Loader(dataset, batch_size, seed=3), before + 1 + after)
    state = json.loads(json.dumps(straight[before][1]))
    resumed = take(Loader(dataset, batch_size, seed=3).resume(state), after)
    assert contents(resumed) == contents(straight[before + 1 :])
    assert [state for _, state in resumed] == [state for _, state in straight[before + 1 :]]


@settings(deadline=None)
@given(DATASETS, st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_the_parts_of_all_ranks_form_the_batches_of_one_process(dataset, rows_each, world_size):
    batch_size = 4 * rows_each
    single = take(Loader(dataset, batch_size, seed=1), 6)
    ranks = [
        take(Loader(dataset, batch_size, seed=1, rank=rank, world_size=world_size), 6) for rank in range(world_size)
    ]
    for (full, state), *parts in zip(single, *ranks, strict=True):
        assert torch.equal(full.tokens, torch.cat([batch.tokens for batch, _ in parts]))
        assert torch.equal(full.targets, torch.cat([batch.targets for batch, _ in parts]))
        assert all(part_state == state for _, part_state in parts)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_number_of_workers_does_not_change_the_batches_before_or_after_a_resume(num_workers):
    dataset = rows_of_unequal_length(23)
    straight = take(Loader(dataset, 4, seed=5), 14)
    with_workers = take(Loader(dataset, 4, seed=5, num_workers=num_workers), 8)
    assert contents(with_workers) == contents(straight[:8])
    resumed = take(Loader(dataset, 4, seed=5, num_workers=3 - num_workers).resume(with_workers[-1][1]), 6)
    assert contents(resumed) == contents(straight[8:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_survives_the_first_signal(number):
    batches = iter(Loader(NumberedRows(9), 4, num_workers=1))
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    assert [len(next(batches)[0].tokens) for _ in range(8)] == [4] * 8
    assert worker.is_alive()


def test_loading_does_not_draw_from_the_global_generator_of_torch():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(Loader(NumberedRows(5), 2), 3)
    assert torch.equal(torch.rand(3), expected)


def test_a_row_has_another_key_in_every_epoch():
    keys = torch.cat([batch.targets for batch, _ in take(Loader(NumberedRows(6), 3), 8)])
    assert len(keys.unique()) == 4 * 6


def test_epoch_order_differs_between_epochs_and_seeds():
    dataset = NumberedRows(50)
    orders = {tuple(epoch_order(dataset, seed, epoch, 8)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(50)) not in orders


@settings(max_examples=20, deadline=None)
@given(st.integers(200, 400), st.integers(0, 4))
def test_rows_of_similar_length_share_a_batch_in_every_epoch(count, epoch):
    """Batches have almost no padding, except the first rows, which complete a batch of the previous epoch."""
    dataset, batch_size = rows_of_unequal_length(count), 8
    assert count < batch_size * POOL_BATCHES
    num_carried = -epoch * count % batch_size
    order = epoch_order(dataset, 0, epoch, batch_size)[num_carried:]
    batches = dataset.lengths[order[: len(order) // batch_size * batch_size]].reshape(-1, batch_size)
    assert (batches.max(axis=1) - batches.min(axis=1)).sum() <= 50  # sorted in one pool: spreads add up to the range
    assert (np.diff(batches.mean(axis=1)) < 0).any()  # the batches are shuffled


@settings(deadline=None)
@given(DATASETS, st.integers(1, 12), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 5]))
def test_evaluation_batches_contain_every_row_once_in_equally_many_parts_per_rank(
    dataset, batch_size, world_size, num_parts
):
    options = {"world_size": world_size, "num_parts": num_parts}
    ranks = [list(evaluation_batches(dataset, batch_size, rank=rank, **options)) for rank in range(world_size)]
    assert {len(parts) for parts in ranks} == {-(-len(dataset) // batch_size) * num_parts}
    parts = [part for parts in ranks for part in parts]
    rows = [row for part in parts if part.num_targets for row in part.tokens[:, 0].tolist()]
    assert sorted(rows) == list(range(len(dataset)))
    assert max(len(part.tokens) for part in parts) <= -(-batch_size // (world_size * num_parts))


def test_the_first_evaluation_batches_are_a_fair_sample_of_lengths():
    dataset = rows_of_unequal_length(800)
    batches = [dataset.lengths[batch.tokens[:, 0]] for batch in evaluation_batches(dataset, 8)]
    assert np.mean([lengths.max() - lengths.min() for lengths in batches]) < 2
    assert abs(np.mean(batches[:25]) - dataset.lengths.mean()) < 8
    equal = [batch.tokens[:, 0].tolist() for batch in evaluation_batches(NumberedRows(5), 2)]
    assert equal == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("loader", "difference"),
    [
        (Loader(NumberedRows(10), 4, seed=2), "seed 1"),
        (Loader(NumberedRows(10), 5, seed=1), "batch_size 4"),
        (Loader(NumberedRows(11), 4, seed=1), "num_rows 10"),
        (Loader(NumberedRows(10, first=1), 4, seed=1), "sample "),
    ],
)
def test_resume_rejects_the_state_of_other_data(loader, difference):
    _, state = take(Loader(NumberedRows(10), 4, seed=1), 3)[-1]
    with pytest.raises(ClearheadError, match=f"the run to resume had {difference}"):
        loader.resume(state)


def test_an_indivisible_batch_size_and_an_empty_dataset_are_rejected():
    with pytest.raises(ClearheadError, match="batch_size is 5; it must be a multiple of the 2 processes"):
        Loader(NumberedRows(10), 5, world_size=2)
    with pytest.raises(ClearheadError, match="no rows"):
        Loader(NumberedRows(0), 5)


@pytest.mark.parametrize("damage", [{"epoch": "1"}, {"row": -1}, {"row": 10**9}, {"epoch": None}])
def test_resume_rejects_a_state_that_no_run_reaches(damage):
    dataset = NumberedRows(10)
    loader = Loader(dataset, 2, seed=1)
    state = next(iter(loader))[1]
    with pytest.raises(ClearheadError, match="which is not possible"):
        loader.resume(state | damage)


def test_a_worker_ends_at_once_if_its_run_was_killed_before_it_started():
    child = os.fork()
    if child == 0:
        _prepare_worker(0, parent=os.getppid() + 1)  # the process that started it is not its parent any more
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
