"""Limits of a chat template: its time, the size of each value, and the total size of all values.

limits = Limits(limit_seconds=1.0)
limits.count(["a", "b"])   # returns the list; one that is too large or too late raises TemplateLimitError
"""

import time
from collections.abc import Mapping
from typing import TypeVar

from jinja2.exceptions import TemplateRuntimeError

# Several times the longest templates in use, which have about 30,000 characters
MAX_TEMPLATE_CHARACTERS = 1 << 17
# For one value and for the result: about two million tokens of English
MAX_VALUE_CHARACTERS = 1 << 23
# For all values together: a long chat, and the copies that a template makes of it
_MAX_TOTAL_CHARACTERS = 1 << 26
_MAX_INTEGER_BITS = 4096
# An element of a list or dictionary counts as this many characters.
_ELEMENT_CHARACTERS = 16

T = TypeVar("T")


class TemplateLimitError(TemplateRuntimeError):
    """A template needs too much time or memory."""


class Limits:
    """The limits of one rendering; the time starts when the object is created."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._deadline_seconds = time.monotonic() + limit_seconds
        self._characters_left = _MAX_TOTAL_CHARACTERS

    def check_time(self) -> None:
        """Raise TemplateLimitError if the time is over."""
        if time.monotonic() > self._deadline_seconds:
            raise TemplateLimitError(f"it runs longer than {self._limit_seconds:g} seconds")

    def count(self, value: T) -> T:
        """Return a new value; raise TemplateLimitError if it exceeds a limit."""
        self.check_time()
        check_size(measure_size(value))
        if isinstance(value, str):
            self._characters_left -= len(value)
        elif isinstance(value, (list, tuple, Mapping)):  # its elements were counted when they were created
            self._characters_left -= _ELEMENT_CHARACTERS * len(value)
        if self._characters_left < 0:
            raise TemplateLimitError(f"it creates values of more than {_MAX_TOTAL_CHARACTERS} characters in total")
        return value


def check_size(characters: int) -> None:
    """Raise TemplateLimitError if a value of this size is too large."""
    if characters > MAX_VALUE_CHARACTERS:
        raise TemplateLimitError(f"it creates a value of more than {MAX_VALUE_CHARACTERS} characters")


def check_bits(bits: int) -> None:
    """Raise TemplateLimitError if an integer of this length is too large."""
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it creates a number of more than {_MAX_INTEGER_BITS} bits")


def measure_size(value: object) -> int:
    """Return the size of a value in characters, counting an element that it holds twice twice.

    The count stops once it exceeds the limit.
    """
    characters = 0
    pending = [value]
    while pending and characters <= MAX_VALUE_CHARACTERS:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            characters += len(item)
        elif isinstance(item, Mapping):
            characters += _ELEMENT_CHARACTERS * len(item)
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            characters += _ELEMENT_CHARACTERS * len(item)
            pending += item
        elif isinstance(item, int):
            check_bits(item.bit_length())
    return characters
