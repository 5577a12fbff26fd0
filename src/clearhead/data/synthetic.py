"""Generate examples of small tasks from a key: a source text and the target text that answers it.

    make_example("reverse", key, 1, 8)             # ('kdwa', 'awdk')
    make_example("capitals", key, 1, 24)           # ('<U> Ze kO iwp', 'ZE KO IWP')
    make_examples("sort", 1, 8, num_examples=1000, seed=0, held_out=True)

Validation examples never occur in training: a hash of the source decides which of the two an example belongs to.
"""

import string
import zlib
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from clearhead.data.counter_random import Keys, random_integers
from clearhead.errors import ClearheadError, unknown_name

Task = Literal["copy", "reverse", "sort", "addition", "induction", "capitals"]
_HELD_OUT_EVERY = 10  # one source in this many is held out for validation
_MAX_ATTEMPTS = 2000  # at one chance in ten, fewer than one in 10^90 examples would need more
_SENTENCE = string.ascii_letters * 2 + string.digits + ".,;:!?'-" + " " * 20


class KeyedRandom:
    """The random numbers of one key, one after another."""

    def __init__(self, key: Keys) -> None:
        self._key, self._num_used = key, 0

    def below(self, limit: int) -> int:
        """Return a random integer below `limit`."""
        self._num_used += 1
        return int(random_integers(self._key, self._num_used) % np.uint64(limit))

    def text(self, alphabet: str, length: int) -> str:
        """Return `length` random characters of an alphabet."""
        self._num_used += length
        counters = np.arange(self._num_used - length + 1, self._num_used + 1)
        indices = random_integers(self._key, counters) % np.uint64(len(alphabet))
        return "".join([alphabet[index] for index in indices.tolist()])


def copy(random: KeyedRandom, length: int) -> tuple[str, str]:
    """Return a random word, and the same word."""
    text = random.text(string.ascii_lowercase, length)
    return text, text


def reverse(random: KeyedRandom, length: int) -> tuple[str, str]:
    """Return a random word, and its letters in reverse order."""
    text = random.text(string.ascii_lowercase, length)
    return text, text[::-1]


def sort(random: KeyedRandom, length: int) -> tuple[str, str]:
    """Return a random word, and its letters in alphabetical order."""
    text = random.text(string.ascii_lowercase, length)
    return text, "".join(sorted(text))


def addition(random: KeyedRandom, length: int) -> tuple[str, str]:
    """Add two numbers of up to `length` digits."""
    first, second = (int(random.text(string.digits, length)) for _ in range(2))
    return f"{first}+{second}", str(first + second)


def induction(random: KeyedRandom, length: int) -> tuple[str, str]:
    """Return ... A B ... A -> B: the character that followed the previous occurrence (Olsson et al. 2022)."""
    text = random.text(string.ascii_lowercase, length)
    source = text + text[random.below(length)]
    previous = source.rindex(source[-1], 0, length)  # the latest of several occurrences
    return source, source[previous + 1]


def capitals(random: KeyedRandom, length: int) -> tuple[str, str]:
    """Change the case of a sentence (book D4): <U> requests upper case and <L> lower case."""
    sentence = " ".join(random.text(_SENTENCE, length).split()) or "a"
    return (f"<U> {sentence}", sentence.upper()) if random.below(2) else (f"<L> {sentence}", sentence.lower())


TASKS: dict[str, Callable[[KeyedRandom, int], tuple[str, str]]] = {
    task.__name__: task for task in (copy, reverse, sort, addition, induction, capitals)
}


def make_example(task: str, key: Keys, min_length: int, max_length: int) -> tuple[str, str]:
    """Return a source and its target. The key decides the length."""
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)
    random = KeyedRandom(key)
    return TASKS[task](random, min_length + random.below(max_length - min_length + 1))


def make_examples(
    task: str, min_length: int, max_length: int, *, num_examples: int, seed: int, held_out: bool
) -> Iterator[tuple[str, str]]:
    """Yield examples whose sources are all held out for validation, or none of them."""
    for number in range(num_examples):
        key = random_integers(random_integers(seed, int(held_out)), number)
        attempts = (
            make_example(task, random_integers(key, index), min_length, max_length) for index in range(_MAX_ATTEMPTS)
        )
        pair = next((pair for pair in attempts if is_held_out(pair[0]) == held_out), None)
        if pair is None:  # a task with only a few sources, all of them on one side
            raise ClearheadError(
                f"the task {task!r} with lengths {min_length} to {max_length} has too few sources to hold some out"
                " for validation; raise data.max_length"
            )
        yield pair


def is_held_out(source: str) -> bool:
    return zlib.crc32(source.encode()) % _HELD_OUT_EVERY == 0
