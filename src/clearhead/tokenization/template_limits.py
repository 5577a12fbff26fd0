"""Limits of a chat template: its time, the size of each value, the total memory of all values, the work of one step.

limits = Limits(limit_seconds=1.0)
limits.count(["a", "b"])   # returns the list; one that is too large or too late raises TemplateLimitError
"""

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from jinja2.exceptions import TemplateRuntimeError

# Several times the longest templates in use, which have about 30,000 characters
MAX_TEMPLATE_CHARACTERS = 1 << 17
# For one value and for the result: about two million tokens of English
MAX_VALUE_CHARACTERS = 1 << 23
# For all values together: a long chat, and the copies that a template makes of it
_MAX_TOTAL_BYTES = 1 << 28
_MAX_INTEGER_BITS = 4096
# An element of a list or dictionary counts as this many characters.
_ELEMENT_CHARACTERS = 16
MAX_ELEMENTS = MAX_VALUE_CHARACTERS // _ELEMENT_CHARACTERS
# Besides its own reference, an element costs about this much: the header of a string or a dictionary's entry.
_ELEMENT_BYTES = 64
# Python compares and hashes nested tuples recursively; JSON in use has a tenth of this depth.
_MAX_DEPTH = 100
# Character comparisons of one search: about 0.3 seconds at worst
_MAX_COMPARISONS = 1 << 28

T = TypeVar("T")


class TemplateLimitError(TemplateRuntimeError):
    """A template needs too much time or memory."""


class Limits:
    """The limits of one rendering, for the thread that creates this object; the time starts then.

    The time is the processor time of the thread, so that a busy machine does not refuse a template that is fine.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._deadline_seconds = time.thread_time() + limit_seconds
        self._bytes_left = _MAX_TOTAL_BYTES

    def check_time(self) -> None:
        """Raise TemplateLimitError if the time is over."""
        if time.thread_time() > self._deadline_seconds:
            raise TemplateLimitError(f"it computes for longer than {self._limit_seconds:g} seconds")

    def count(self, value: T) -> T:
        """Return a new value; raise TemplateLimitError if it exceeds a limit."""
        self.check_time()
        check_size(measure_size(value))
        self._bytes_left -= sys.getsizeof(value)
        if isinstance(value, (list, tuple, Mapping)):  # long elements were counted when they were created
            self._bytes_left -= _ELEMENT_BYTES * len(value)
        if self._bytes_left < 0:
            raise TemplateLimitError(f"it creates values of more than {_MAX_TOTAL_BYTES >> 20} MiB in total")
        return value

    def iterate(self, values: Iterable[T]) -> Iterator[T]:
        """Yield the values, checking the time before each."""
        for value in values:
            self.check_time()
            yield value


def check_size(characters: int) -> None:
    """Raise TemplateLimitError if a value of this size is too large."""
    if characters > MAX_VALUE_CHARACTERS:
        raise TemplateLimitError(f"it creates a value of more than {MAX_VALUE_CHARACTERS} characters")


def check_elements(num_elements: int) -> None:
    """Raise TemplateLimitError if a template asks for a list longer than the limit."""
    check_size(num_elements * _ELEMENT_CHARACTERS)


def check_bits(bits: int) -> None:
    """Raise TemplateLimitError if an integer of this length is too large."""
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it creates a number of more than {_MAX_INTEGER_BITS} bits")


def check_search(text: object, part: object) -> None:
    """Raise TemplateLimitError if a search for `part` in `text` could take too many comparisons.

    Python's searches from the right, and its `strip`, compare each character of one with each of the other at worst.
    """
    if isinstance(text, str) and isinstance(part, str) and len(text) * len(part) > _MAX_COMPARISONS:
        raise TemplateLimitError(
            f"it searches {len(text)} characters for a text of {len(part)} characters, which may take too long"
        )


def measure_size(value: object) -> int:
    """Return the size of a value in characters, counting an element that it holds twice twice.

    The count stops once it exceeds the limit. Raise TemplateLimitError if the value is nested too deeply.
    """
    characters, depth = 0, 0
    level = [value]
    while level and characters <= MAX_VALUE_CHARACTERS:
        if depth > _MAX_DEPTH:
            raise TemplateLimitError(f"it nests values more than {_MAX_DEPTH} deep")
        depth += 1
        following: list[object] = []
        for item in level:
            if isinstance(item, (str, bytes)):
                characters += len(item)
            elif isinstance(item, int):
                bits = item.bit_length()
                check_bits(bits)
                characters += bits // 3  # its decimal digits
            elif isinstance(item, Mapping):
                characters += _ELEMENT_CHARACTERS * len(item)
                following += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple, set, frozenset)):
                characters += _ELEMENT_CHARACTERS * len(item)
                following += item
            if characters > MAX_VALUE_CHARACTERS:
                break
        level = following
    return characters
