"""Test counter-based random numbers against the published generator and for uniformity."""

import numpy as np
import torch

from clearhead.data.counter_random import permutation, random_integers, row_keys, uniform
from clearhead.sampling.randomness import splitmix


def test_random_integers_equal_the_splitmix64_test_vectors():
    """First outputs for seed 1234567, as in the test vectors of Rosetta Code's "Pseudo-random numbers/Splitmix64"."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert random_integers(1234567, np.arange(5)).tolist() == expected


def test_random_integers_equal_the_generator_of_clearhead_generation():
    seeds, index = np.arange(7)[:, None], np.arange(5)
    ours = random_integers(seeds, index).view(np.int64)
    assert torch.equal(torch.from_numpy(ours), splitmix(torch.from_numpy(seeds), torch.from_numpy(index)))


def test_row_keys_differ_between_rows_epochs_and_seeds():
    keys = [row_keys(seed, epoch, np.arange(100)) for seed in range(3) for epoch in range(5)]
    assert len(set(np.concatenate(keys).tolist())) == 1500


def test_uniform_fills_the_unit_interval_evenly():
    values = uniform(row_keys(0, 0, np.arange(100)), 1000)
    assert values.shape == (100, 1000)
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert counts.sum() == 100_000  # no value outside
    assert abs(counts - 10_000).max() < 500  # five standard deviations of 95


def test_permutation_puts_each_number_anywhere_with_equal_frequency():
    orders = np.array([permutation(key, 4) for key in range(4000)])
    assert (np.sort(orders) == np.arange(4)).all()
    for column in orders.T:
        assert abs(np.bincount(column) - 1000).max() < 140  # five standard deviations of 27
