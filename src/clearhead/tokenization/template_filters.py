"""The filters, tests and functions that a chat template may use; each one checks the time and the size of its result.

    FILTERS["join"](context, ["a", "b"], "-")   # 'a-b'

The functions that Jinja does not have are those that the transformers library provides to templates. Jinja's filters
that are missing here (`center`, `format`, `round`, ...) would need limits of their own and occur in no template.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError, pass_context
from jinja2 import tests as jinja_tests
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace

from clearhead.tokenization import template_text as text_operations
from clearhead.tokenization.template_limits import Limits, TemplateLimitError, check_elements, check_search

_JINJA_TESTS: dict[str, Callable[..., Any]] = {**jinja_tests.TESTS}  # type: ignore[dict-item]
# Names of nested attributes in use have about 20 characters.
_MAX_ATTRIBUTE_CHARACTERS = 256


def _limits_of(context: Context) -> Limits:
    """Return the limits of the rendering in which a filter is called."""
    limits: Limits = context.environment.limits  # type: ignore[attr-defined]
    return limits


@pass_context
def _limit_loop(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values of a loop, checking the time before each."""
    return _limits_of(context).iterate(_iterable(values))


@pass_context
def _limit_value(context: Context, value: Any) -> Any:
    """Return a new value after counting it against the limits."""
    return _limits_of(context).count(value)


@pass_context
def _limit_output(context: Context, value: Any) -> str:
    """Return a piece of output, of the template or of a macro or block, after counting it against the limits."""
    return _limits_of(context).count(str(value))


@pass_context
def _compare(context: Context, left: Any, *operations: Any) -> bool:
    """Return the value of a chain of comparisons, given as names of Jinja's tests and operands in turn."""
    for name, right in zip(operations[::2], operations[1::2], strict=True):
        if not _COMPARISONS[name](_limits_of(context), left, right):
            return False
        left = right
    return True


def _contains(limits: Limits, values: Any, value: Any) -> bool:
    limits.check_time()
    check_search(values, value)
    return value in values


def _plain_comparison(name: str) -> Callable[[Limits, Any, Any], bool]:
    def run(limits: Limits, left: Any, right: Any) -> bool:
        limits.check_time()
        return bool(_JINJA_TESTS[name](left, right))

    return run


# By the names of the operators in Jinja's syntax tree
_COMPARISONS: dict[str, Callable[[Limits, Any, Any], bool]] = {
    **{name: _plain_comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "lteq": _plain_comparison("le"),
    "gteq": _plain_comparison("ge"),
    "in": lambda limits, value, values: _contains(limits, values, value),
    "notin": lambda limits, value, values: not _contains(limits, values, value),
}


def _iterable(values: Any) -> Any:
    """Return what a filter iterates over; raise TemplateLimitError for a text of too many characters."""
    if isinstance(values, str):
        check_elements(len(values))
    return values


def _plain_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return one of Jinja's filters or tests whose time and result are proportional to its input, with limits."""
    passed = getattr(function, "jinja_pass_arg", None)
    kind = passed.name if passed is not None else ""

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        _limits_of(context).check_time()
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}.get(kind)
        return _limits_of(context).count(function(*args, **kwargs) if kind == "" else function(first, *args, **kwargs))

    return run


def _iterating_filter(function: Callable[..., Any], attribute_index: int | None) -> Callable[..., Any]:
    """Return one of Jinja's filters over the elements of its input, which checks the time before each element."""
    plain = _plain_filter(function)

    @pass_context
    def run(context: Context, values: Any, *args: Any, **kwargs: Any) -> Any:
        attributes = [kwargs.get("attribute")]
        if attribute_index is not None:
            attributes += args[attribute_index : attribute_index + 1]
        if any(isinstance(name, str) and len(name) > _MAX_ATTRIBUTE_CHARACTERS for name in attributes):
            raise TemplateLimitError(f"it names an attribute of more than {_MAX_ATTRIBUTE_CHARACTERS} characters")
        elements = _iterable(values)
        if isinstance(elements, Iterable):
            elements = _limits_of(context).iterate(elements)
        return plain(context, elements, *args, **kwargs)

    return run


def _text_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation on text as a filter, which takes whatever can be converted to a text."""

    @pass_context
    def run(context: Context, text: Any, *args: Any, **kwargs: Any) -> Any:
        limits = _limits_of(context)
        limits.check_time()
        return limits.count(function(limits, text, *args, **kwargs))

    return run


@pass_context
def _join(context: Context, values: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Join like Jinja's filter."""
    if attribute is not None:
        if isinstance(attribute, str) and len(attribute) > _MAX_ATTRIBUTE_CHARACTERS:
            raise TemplateLimitError(f"it names an attribute of more than {_MAX_ATTRIBUTE_CHARACTERS} characters")
        values = map(make_attrgetter(context.environment, attribute), values)
    limits = _limits_of(context)
    return limits.count(text_operations.join(limits, str(d), values))


@pass_context
def _make_dict(context: Context, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Return a dictionary, checking the time for each entry: keys with equal hashes take ever longer."""
    result: dict[Any, Any] = {}
    for source in args:
        pairs = source.items() if isinstance(source, Mapping) else source
        for key, value in _limits_of(context).iterate(pairs):
            result[key] = value
    return result | kwargs


@pass_context
def _make_namespace(context: Context, *args: Any, **kwargs: Any) -> Namespace:
    """Return an object whose attributes a template may set."""
    return Namespace(_make_dict(context, *args, **kwargs))


def _raise_exception(message: str) -> NoReturn:
    """Let a template reject its messages."""
    raise TemplateError(message)


def _require_numbers(function: Callable[..., bool]) -> Callable[..., bool]:
    """Return a test of numbers; Jinja's would format a text with `%`."""

    def run(*values: Any) -> bool:
        if not all(isinstance(value, (int, float)) for value in values):
            raise TypeError(f"the test needs numbers, not {', '.join(type(value).__name__ for value in values)}")
        return function(*values)

    return run


def _comparison_test(name: str) -> Callable[..., bool]:
    @pass_context
    def run(context: Context, left: Any, right: Any) -> bool:
        return _COMPARISONS[name](_limits_of(context), left, right)

    return run


_PLAIN_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "items", "last", "length"),
    *("lower", "reverse", "safe", "string", "upper"),
)
# The position of `attribute` among the arguments after the value
_ITERATING_FILTERS = {
    **dict.fromkeys(("list", "map", "reject", "select")),
    **dict.fromkeys(("selectattr", "rejectattr"), 0),
    **dict.fromkeys(("max", "min", "unique"), 1),
    "sort": 2,
}
FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _plain_filter(JINJA_FILTERS[name]) for name in _PLAIN_FILTERS},
    **{name: _iterating_filter(JINJA_FILTERS[name], index) for name, index in _ITERATING_FILTERS.items()},
    "float": _text_filter(text_operations.to_float),
    "indent": _text_filter(
        lambda limits, text, *args, **kwargs: text_operations.indent(limits, str(text), *args, **kwargs)
    ),
    "int": _text_filter(text_operations.to_int),
    "join": _join,
    "replace": _text_filter(
        lambda limits, s, old, new, count=None: text_operations.replace(limits, str(s), old, new, count)
    ),
    "title": _text_filter(text_operations.title),
    "tojson": _text_filter(text_operations.to_json),
    "trim": _text_filter(text_operations.trim),
    "limit_loop": _limit_loop,  # inserted by the compiler, as are the following
    "limit_output": _limit_output,
    "limit_value": _limit_value,
    "compare": _compare,
}
TESTS: dict[str, Callable[..., Any]] = {
    **{name: _plain_filter(test) for name, test in _JINJA_TESTS.items()},
    **{name: _plain_filter(_require_numbers(_JINJA_TESTS[name])) for name in ("divisibleby", "even", "odd")},
    "in": _comparison_test("in"),
}
GLOBALS: dict[str, Any] = {
    "dict": _make_dict,
    "namespace": _make_namespace,
    "raise_exception": _raise_exception,
    "range": safe_range,
    "strftime_now": text_operations.format_time,
}
