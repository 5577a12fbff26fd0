"""Generate random numbers from keys and counters, so that any of them can be generated again without stored state.

    keys = row_keys(seed=0, epochs=3, rows=np.arange(8))   # one key for each row of a dataset in epoch 3
    uniform(keys, 5)                                       # (8, 5) floats in [0, 1)

The generator is SplitMix64 (Steele, Lea & Flood 2014): number n of a seed is a hash of seed + n · GOLDEN.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]
Ids = NDArray[np.int64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # with the shifts below: David Stafford's "Mix13"
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def random_integers(keys: ArrayLike, index: ArrayLike) -> Keys:
    """Return the 64-bit random number at `index`, from 0, of each key. The two arguments broadcast."""
    with np.errstate(over="ignore"):  # the sums and products are modulo 2^64
        z = np.asarray(keys).astype(np.uint64) + (np.asarray(index).astype(np.uint64) + np.uint64(1)) * GOLDEN
        z = (z ^ (z >> np.uint64(30))) * FIRST_FACTOR
        z = (z ^ (z >> np.uint64(27))) * SECOND_FACTOR
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def row_keys(seed: int, epochs: ArrayLike, rows: ArrayLike) -> Keys:
    """Return a key for each row in each epoch. It decides the row's place in the order and seeds its randomness."""
    return random_integers(random_integers(seed, epochs), rows)


def uniform(keys: Keys, count: int) -> NDArray[np.float64]:
    """Return `count` floats in [0, 1) for each key, with 53 random bits each: (...) -> (..., count)."""
    return (random_integers(keys[..., None], np.arange(count)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(key: ArrayLike, count: int) -> Ids:
    """Return the integers below `count` in an order that depends on the key: sorted by one random number each."""
    return np.argsort(random_integers(key, np.arange(count)), kind="stable")
