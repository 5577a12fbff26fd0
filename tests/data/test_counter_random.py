"""Random numbers by place: the published generator, and even."""

import numpy as np
import torch

from clearhead.data.counter_random import numbers, row_keys, shuffled, uniform
from clearhead.generation.randomness import splitmix


def test_numbers_are_those_of_splitmix64():
    """First outputs for seed 1234567, as in the test vectors of Rosetta Code's "Pseudo-random numbers/Splitmix64"."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert numbers(1234567, np.arange(5)).tolist() == known


def test_numbers_agree_with_those_of_generation():
    seeds, index = np.arange(7)[:, None], np.arange(5)
    ours = numbers(seeds, index).view(np.int64)
    assert torch.equal(torch.from_numpy(ours), splitmix(torch.from_numpy(seeds), torch.from_numpy(index)))


def test_every_row_has_a_key_of_its_own_in_each_epoch_and_seed():
    keys = [row_keys(seed, epoch, np.arange(100)) for seed in range(3) for epoch in range(5)]
    assert len(set(np.concatenate(keys).tolist())) == 1500


def test_uniform_is_even():
    values = uniform(row_keys(0, 0, np.arange(100)), 1000)
    assert values.shape == (100, 1000)
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert counts.sum() == 100_000  # nothing outside
    assert abs(counts - 10_000).max() < 500  # five deviations of 95


def test_shuffled_puts_each_number_anywhere():
    places = np.array([shuffled(key, 4) for key in range(4000)])
    assert (np.sort(places) == np.arange(4)).all()
    for column in places.T:
        assert abs(np.bincount(column) - 1000).max() < 140  # five deviations of 27
