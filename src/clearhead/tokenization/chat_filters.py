"""The filters, methods and functions that a chat template may use.

    GUARDED_FILTERS["join"](context, ["a", "b"], "-")   # 'a-b', weighed before it is joined

The functions beyond Jinja's own are those that the transformers library gives to its templates.
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

from clearhead.tokenization.chat_limits import Limits, TemplateLimitError, require_size

MAX_JSON_INDENT = 16


def limits_of(context: Context) -> Limits:
    """The limits of the rendering that a filter is called in."""
    limits: Limits = context.environment.limits  # type: ignore[attr-defined]
    return limits


@pass_context
def watched(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """The values of a loop."""
    for value in values:
        limits_of(context).tick()
        yield value


@pass_context
def admitted(context: Context, value: Any) -> Any:
    return limits_of(context).admit(value)


@pass_context
def written(context: Context, value: Any) -> str:
    """A piece of the output, or of a macro's or a block's."""
    return limits_of(context).admit(str(value))


@pass_context
def join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    separator, pieces, characters = str(d), [], 0
    for value in values:
        limits_of(context).tick()
        pieces.append(str(value))
        characters += len(pieces[-1]) + len(separator)
        require_size(characters)
    return separator.join(pieces)


@pass_context
def replace(context: Context, s: str, old: str, new: str, count: int | None = None) -> str:
    text, old, new = str(s), str(old), str(new)
    require_size(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def indent(context: Context, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(s)
    require_size(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
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
    """JSON as it is, where Jinja's own filter would escape it for HTML."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > MAX_JSON_INDENT:
        raise TemplateLimitError(f"it indents JSON by more than {MAX_JSON_INDENT}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return join(context, encoder.iterencode(value))


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


# Of Jinja's filters, those whose work and result grow no faster than their input.
PLAIN_FILTERS: dict[str, Callable[..., Any]] = {
    name: FILTERS[name]
    for name in (
        *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int"),
        *("items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse"),
        *("safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
    )
}
GUARDED_FILTERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (watched, admitted, written, join, replace, indent, tojson)
}
GLOBALS: dict[str, Any] = {
    "dict": make_dict,
    "namespace": Namespace,
    "raise_exception": raise_exception,
    "range": safe_range,
    "strftime_now": strftime_now,
}

TEXT_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal"),
        *("isdigit", "islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip", "partition"),
        *("removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip"),
        *("split", "splitlines", "startswith", "strip", "title", "upper"),
    )
)
# By the type of their object; objects of other types are Jinja's own.
METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, TEXT_METHODS),
    (Mapping, frozenset(("get", "items", "keys", "values"))),
    ((list, tuple), frozenset(("count", "index"))),
    ((int, float, bytes), frozenset()),
)
