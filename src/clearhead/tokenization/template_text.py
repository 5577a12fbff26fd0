"""The operations on text that a chat template may use; each checks the size of its result before it creates it.

    replace(limits, "a.b", ".", "/")   # 'a/b'

The functions have the parameters of Python's string methods of the same name, after the limits and the text.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, do_indent

from clearhead.tokenization.template_limits import (
    MAX_ELEMENTS,
    Limits,
    TemplateLimitError,
    check_elements,
    check_search,
    check_size,
)

_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_MAX_JSON_INDENT = 16
_MAX_DIGITS = 5000
_MAX_FIELD_DIGITS = 9
# Jinja's `title` splits a text into its words, and each costs more memory than its characters.
_MAX_TITLE_CHARACTERS = 1 << 20
# A directive of strftime without a width: C libraries accept any number there.
_TIME_FORMAT = re.compile(r"(?:[^%]|%[-_0^#EO:]?[A-Za-z%])*", re.DOTALL)
_MAX_TIME_FORMAT_CHARACTERS = 200


def join(limits: Limits, separator: str, values: Iterable[Any]) -> str:
    """Join texts, checking time and size before each."""
    pieces: list[str] = []
    characters = 0
    for value in limits.iterate(values):
        pieces.append(str(value))
        characters += len(pieces[-1]) + len(separator) + 1
        check_size(characters)
    return separator.join(pieces)


def replace(limits: Limits, text: str, old: str, new: str, count: int | None = None) -> str:
    """Replace a part of a text."""
    old, new = str(old), str(new)
    check_search(text, old)
    check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


def _format(limits: Limits, text: str, /, *args: Any, **kwargs: Any) -> str:
    """Fill in `{}`, `{0}` and `{name}`; raise SecurityError for attributes, conversions, widths and other formats."""
    pieces: list[Any] = []
    num_unnumbered = 0
    for literal, field, width_and_type, conversion in limits.iterate(Formatter().parse(text)):
        pieces.append(literal)
        if field is None:
            continue
        if width_and_type or conversion or not (field == "" or field.isidentifier() or field.isdecimal()):
            raise SecurityError("format supports only plain fields such as {} and {name}")
        if field.isidentifier():
            pieces.append(kwargs[field])
        else:
            pieces.append(args[int(field[:_MAX_FIELD_DIGITS] or num_unnumbered)])
            num_unnumbered += 1
    return join(limits, "", pieces)


def split(limits: Limits, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    """Split a text into a limited number of parts."""
    check_search(text, sep)
    parts = text.split(sep, maxsplit if 0 <= maxsplit < MAX_ELEMENTS else MAX_ELEMENTS)
    check_elements(len(parts))
    limits.count(text)  # the parts together are as long
    return parts


def rsplit(limits: Limits, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    """Split a text from its end into a limited number of parts."""
    check_search(text, sep)
    parts = text.rsplit(sep, maxsplit if 0 <= maxsplit < MAX_ELEMENTS else MAX_ELEMENTS)
    check_elements(len(parts))
    limits.count(text)
    return parts


def splitlines(limits: Limits, text: str, keepends: bool = False) -> list[str]:
    """Split a text into a limited number of lines."""
    check_elements(_count_lines(text))
    limits.count(text)
    return text.splitlines(keepends)


def indent(limits: Limits, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent the lines of a text like Jinja's filter."""
    num_lines = _count_lines(text)
    check_elements(num_lines)
    check_size(len(text) + num_lines * (width if isinstance(width, int) else len(width)))
    return do_indent(text, width, first, blank)


def _count_lines(text: str) -> int:
    """Return at least the number of lines."""
    return 1 + sum(text.count(end) for end in _LINE_ENDS)


def title(limits: Limits, text: Any) -> Any:
    """Capitalize words like Jinja's filter."""
    if len(str(text)) > _MAX_TITLE_CHARACTERS:
        raise TemplateLimitError(f"it applies `title` to more than {_MAX_TITLE_CHARACTERS} characters")
    return FILTERS["title"](text)


def trim(limits: Limits, text: Any, chars: str | None = None) -> Any:
    """Remove these characters from both ends like Jinja's filter."""
    check_search(text, chars)
    return FILTERS["trim"](text, chars)


def to_int(limits: Limits, value: Any, default: int = 0, base: int = 10) -> int:
    """Convert to an integer like Jinja's filter."""
    return int(FILTERS["int"](_short_number(value), default, base))


def to_float(limits: Limits, value: Any, default: float = 0.0) -> float:
    """Convert to a floating-point number like Jinja's filter."""
    return float(FILTERS["float"](_short_number(value), default))


def _short_number(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise TemplateLimitError(f"it reads a number of more than {_MAX_DIGITS} characters")
    return value


def to_json(
    limits: Limits,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > _MAX_JSON_INDENT:
        raise TemplateLimitError(f"it indents JSON by more than {_MAX_JSON_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return join(limits, "", encoder.iterencode(value))


def format_time(pattern: str) -> str:
    """Return the current local time in this format; raise TemplateLimitError if it contains a width."""
    if not isinstance(pattern, str):
        raise TypeError(f"the format of strftime_now must be str, not {type(pattern).__name__}")
    if len(pattern) > _MAX_TIME_FORMAT_CHARACTERS or not _TIME_FORMAT.fullmatch(pattern):
        raise TemplateLimitError(f"it formats the time with {pattern[:40]!r}; only plain directives are allowed")
    return datetime.now().strftime(pattern)


def _searching(name: str) -> Callable[..., Any]:
    """Return a string method that searches for its first argument, after a check of its work."""

    def search(limits: Limits, text: str, *args: Any) -> Any:
        for part in args[:1]:
            check_search(text, part)
        return getattr(text, name)(*args)

    return search


_SEARCHING_METHODS = (
    "count",
    "find",
    "index",
    "lstrip",
    "partition",
    "rfind",
    "rindex",
    "rpartition",
    "rstrip",
    "strip",
)
# Methods of strings whose time or result can grow faster than the text
LIMITED_METHODS: dict[str, Callable[..., Any]] = {
    **{name: _searching(name) for name in _SEARCHING_METHODS},
    "format": _format,
    "join": join,
    "replace": replace,
    "rsplit": rsplit,
    "split": split,
    "splitlines": splitlines,
}
# Methods of strings that take time and memory proportional to the text
PLAIN_METHODS = frozenset(
    (
        *("capitalize", "endswith", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric"),
        *("isspace", "isupper", "lower", "removeprefix", "removesuffix", "startswith", "title", "upper"),
    )
)
