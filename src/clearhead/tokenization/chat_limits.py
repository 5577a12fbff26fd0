"""How much a chat template may ask for: time, the size of each value, and the sum of all.

limits = Limits(limit_seconds=1.0)
limits.admit(["a", "b"])   # passes; a list too large, or too late, raises TemplateLimitError
"""

import time
from collections.abc import Mapping
from typing import TypeVar

from jinja2.exceptions import TemplateRuntimeError

# Several times the longest templates in use, which have some 30,000 characters.
MAX_TEMPLATE_CHARACTERS = 1 << 17
# Of one value and of the result: some two million tokens of English.
MAX_VALUE_CHARACTERS = 1 << 23
# Of all values made: a long chat, and the copies that a template makes of it.
MAX_TOTAL_CHARACTERS = 1 << 26
MAX_INTEGER_BITS = 4096
# An element of a list or dictionary weighs as much as this many characters.
ELEMENT_CHARACTERS = 16

T = TypeVar("T")


class TemplateLimitError(TemplateRuntimeError):
    """A template asked for too much time or space."""


class Limits:
    """The limits of one rendering; the clock starts when they are made."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._deadline_seconds = time.monotonic() + limit_seconds
        self._characters_left = MAX_TOTAL_CHARACTERS

    def tick(self) -> None:
        """Look at the clock."""
        if time.monotonic() > self._deadline_seconds:
            raise TemplateLimitError(f"it runs longer than {self._limit_seconds:g} seconds")

    def admit(self, value: T) -> T:
        """Weigh a value that was just made, and let it pass."""
        self.tick()
        require_size(size_of(value))
        if isinstance(value, str):
            self._characters_left -= len(value)
        elif isinstance(value, (list, tuple, Mapping)):  # what it holds was counted when that was made
            self._characters_left -= ELEMENT_CHARACTERS * len(value)
        if self._characters_left < 0:
            raise TemplateLimitError(f"it makes values of more than {MAX_TOTAL_CHARACTERS} characters in all")
        return value


def require_size(characters: int) -> None:
    """Check what a value weighs, or would weigh if it were made."""
    if characters > MAX_VALUE_CHARACTERS:
        raise TemplateLimitError(f"it makes a value of more than {MAX_VALUE_CHARACTERS} characters")


def require_bits(bits: int) -> None:
    """Check the length of a whole number."""
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")


def size_of(value: object) -> int:
    """What a value weighs, elements that it holds twice counted twice; stops once that is too much."""
    characters = 0
    waiting = [value]
    while waiting and characters <= MAX_VALUE_CHARACTERS:
        item = waiting.pop()
        if isinstance(item, (str, bytes)):
            characters += len(item)
        elif isinstance(item, Mapping):
            characters += ELEMENT_CHARACTERS * len(item)
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            characters += ELEMENT_CHARACTERS * len(item)
            waiting += item
        elif isinstance(item, int):
            require_bits(item.bit_length())
    return characters
