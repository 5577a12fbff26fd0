"""Tasks that need no file: a question and its answer, as text, made from a key.

    make("reverse", key, 1, 8)                     # ('kdwa', 'awdk')
    make("capitals", key, 1, 24)                   # ('<U> Ze kO iwp', 'ZE KO IWP')
    examples("sort", 1, 8, num_examples=1000, seed=0, held_out=True)

Examples for validation are never among those for training: a hash of the question decides to which they belong.
"""

import string
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal

import numpy as np

from clearhead.data.counter_random import Numbers, numbers
from clearhead.errors import unknown_name

Task = Literal["copy", "reverse", "sort", "addition", "induction", "capitals"]
HELD_OUT = 10  # one question in this many
SENTENCE = string.ascii_letters * 2 + string.digits + ".,;:!?'-" + " " * 20


class Draws:
    """The numbers of one key, one after the other."""

    def __init__(self, key: Numbers) -> None:
        self._key, self._used = key, 0

    def below(self, limit: int) -> int:
        self._used += 1
        return int(numbers(self._key, self._used) % np.uint64(limit))

    def text(self, alphabet: str, length: int) -> str:
        self._used += length
        places = numbers(self._key, np.arange(self._used - length + 1, self._used + 1)) % np.uint64(len(alphabet))
        return "".join([alphabet[place] for place in places.tolist()])


def copy(draws: Draws, length: int) -> tuple[str, str]:
    text = draws.text(string.ascii_lowercase, length)
    return text, text


def reverse(draws: Draws, length: int) -> tuple[str, str]:
    text = draws.text(string.ascii_lowercase, length)
    return text, text[::-1]


def sort(draws: Draws, length: int) -> tuple[str, str]:
    text = draws.text(string.ascii_lowercase, length)
    return text, "".join(sorted(text))


def addition(draws: Draws, length: int) -> tuple[str, str]:
    """Two numbers of up to `length` digits."""
    first, second = (int(draws.text(string.digits, length)) for _ in range(2))
    return f"{first}+{second}", str(first + second)


def induction(draws: Draws, length: int) -> tuple[str, str]:
    """... A B ... A -> B: what followed the last token where it stood before (Olsson et al. 2022)."""
    text = draws.text(string.ascii_lowercase, length)
    question = text + text[draws.below(length)]
    place = question.rindex(question[-1], 0, length)  # of several, the last one counts
    return question, question[place + 1]


def capitals(draws: Draws, length: int) -> tuple[str, str]:
    """The book's task (D4): <U> asks for capitals, <L> for small letters."""
    sentence = " ".join(draws.text(SENTENCE, length).split()) or "a"
    return (f"<U> {sentence}", sentence.upper()) if draws.below(2) else (f"<L> {sentence}", sentence.lower())


TASKS: dict[str, Callable[[Draws, int], tuple[str, str]]] = {
    task.__name__: task for task in (copy, reverse, sort, addition, induction, capitals)
}


def make(task: str, key: Numbers, min_length: int, max_length: int) -> tuple[str, str]:
    """One question and its answer, of a length that the key decides."""
    if task not in TASKS:
        raise unknown_name("task", task, TASKS)
    draws = Draws(key)
    return TASKS[task](draws, min_length + draws.below(max_length - min_length + 1))


def examples(
    task: str, min_length: int, max_length: int, *, num_examples: int, seed: int, held_out: bool
) -> Iterator[tuple[str, str]]:
    """Examples of those held out for validation or of the others."""
    for number in range(num_examples):
        key = numbers(numbers(seed, int(held_out)), number)
        tries = (make(task, numbers(key, attempt), min_length, max_length) for attempt in count(0))
        yield next(pair for pair in tries if is_held_out(pair[0]) == held_out)


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT == 0
