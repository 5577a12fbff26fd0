"""The filters, methods and functions that a chat template may use.

    LIMITED_FILTERS["join"](context, ["a", "b"], "-")   # 'a-b', after a check of its size

The functions that Jinja does not have are those that the transformers library provides to templates.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, pass_context
from jinja2.filters import FILTERS, do_indent, make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace

from clearhead.tokenization.template_limits import Limits, TemplateLimitError, check_size

_MAX_JSON_INDENT = 16


def _limits_of(context: Context) -> Limits:
    """Return the limits of the rendering in which a filter is called."""
    limits: Limits = context.environment.limits  # type: ignore[attr-defined]
    return limits


@pass_context
def limit_loop(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of a loop, checking the time before each."""
    for value in values:
        _limits_of(context).check_time()
        yield value


@pass_context
def limit_value(context: Context, value: Any) -> Any:
    """Return a new value after counting it against the limits."""
    return _limits_of(context).count(value)


@pass_context
def limit_output(context: Context, value: Any) -> str:
    """Return a piece of output, of the template or of a macro or block, after counting it against the limits."""
    return _limits_of(context).count(str(value))


@pass_context
def join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Join like Jinja's filter, checking the size before each piece."""
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    separator, pieces, characters = str(d), [], 0
    for value in values:
        _limits_of(context).check_time()
        pieces.append(str(value))
        characters += len(pieces[-1]) + len(separator)
        check_size(characters)
    return separator.join(pieces)


@pass_context
def replace(context: Context, s: str, old: str, new: str, count: int | None = None) -> str:
    """Replace like Jinja's filter, checking the size of the result first."""
    text, old, new = str(s), str(old), str(new)
    check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def indent(context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Indent like Jinja's filter, checking the size of the result first."""
    text = str(s)
    check_size(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return do_indent(text, width, first, blank)


@pass_context
def tojson(
    context: Context,
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
    return join(context, encoder.iterencode(value))


def raise_exception(message: str) -> NoReturn:
    """Let a template reject its messages."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the current local time in this format."""
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dictionary; a template may not use the type `dict` itself."""
    return dict(*args, **kwargs)


# Jinja's filters whose time and result grow no faster than their input
PLAIN_FILTERS: dict[str, Callable[..., Any]] = {
    name: FILTERS[name]
    for name in (
        *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int"),
        *("items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse"),
        *("safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
    )
}
LIMITED_FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (limit_loop, limit_value, limit_output, join, replace, indent, tojson)
}
GLOBALS: dict[str, Any] = {
    "dict": _make_dict,
    "namespace": Namespace,
    "raise_exception": raise_exception,
    "range": safe_range,
    "strftime_now": strftime_now,
}

_STRING_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
        *("isdigit", "islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
        *("split", "splitlines", "startswith", "strip", "title", "upper"),
    )
)
# The methods that a template may call, by the type of the object; other objects are Jinja's own.
METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, _STRING_METHODS),
    (Mapping, frozenset(("get", "items", "keys", "values"))),
    ((list, tuple), frozenset(("count", "index"))),
    ((int, float, bytes), frozenset()),
)
