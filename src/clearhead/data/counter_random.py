"""Random numbers as a function of where they are used, so that nothing has to be remembered to draw them again.

    keys = row_keys(seed=0, epochs=3, rows=np.arange(8))   # one number for each row of a dataset in epoch 3
    uniform(keys, 5)                                       # (8, 5) floats in [0, 1) that go with them

The numbers are those of SplitMix64 (Steele, Lea & Flood 2014): number n of a seed is a hash of seed + n · GOLDEN.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Numbers = NDArray[np.uint64]
Ids = NDArray[np.int64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # with the shifts below: David Stafford's "Mix13"
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def numbers(keys: ArrayLike, index: ArrayLike) -> Numbers:
    """Number `index`, counted from 0, of each key; the two broadcast."""
    with np.errstate(over="ignore"):  # the sums and products are meant modulo 2^64
        z = np.asarray(keys).astype(np.uint64) + (np.asarray(index).astype(np.uint64) + np.uint64(1)) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * FIRST_FACTOR
        z = (z ^ (z >> np.uint64(27))) * SECOND_FACTOR
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def row_keys(seed: int, epochs: ArrayLike, rows: ArrayLike) -> Numbers:
    """A key for each row in each epoch: its place in the order, and the seed of whatever it draws."""
    return numbers(numbers(seed, epochs), rows)


def uniform(keys: Numbers, count: int) -> NDArray[np.float64]:
    """(...) -> (..., count) floats in [0, 1), of 53 random bits each."""
    return (numbers(keys[..., None], np.arange(count)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffled(key: ArrayLike, count: int) -> Ids:
    """The numbers below `count` in an order that the key decides: that of one random number each."""
    return np.argsort(numbers(key, np.arange(count)), kind="stable")
