"""A Jinja environment for untrusted templates, with limits on time and memory.

    TemplateSandbox(limit_seconds=1.0).render("{{ greeting }}!", {"greeting": "hello"})   # 'hello!'

Jinja's own sandbox keeps a template away from Python's internals, but lets it run forever. Here every operation of a
template is one of ours: loops, comparisons, outputs and new values go through filters that `template_compiler` inserts;
calls, operators, items and attributes through the methods below; filters, tests, functions and methods of strings are
listed in `template_filters` and `template_text`. Each one checks the time before it starts and the size of its result:
before creating it, if the result could be larger than its input, and the product of both sizes for a search. So no
single step takes more than a fraction of a second or a few hundred megabytes, and a check follows it. What could take
longer (`center`, `%` on strings, widths in `format` and `strftime_now`) is not available.

A child process with resource limits would need no such list, but it takes 0.1 to 0.5 seconds to start, has to survive
threads, forked workers and interrupts, and has no memory limit on Windows and macOS; a template renders here in less
than a millisecond. The tests attack this design with hostile templates of each kind, in a process that they measure.
"""

from collections.abc import Mapping
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from clearhead.tokenization.template_compiler import GenerationBlock, TimedGenerator, TimedTokens, compile_template
from clearhead.tokenization.template_filters import FILTERS, GLOBALS, TESTS
from clearhead.tokenization.template_limits import Limits, check_bits, check_size, measure_size
from clearhead.tokenization.template_text import LIMITED_METHODS, PLAIN_METHODS

# The methods that a template may call, by the type of the object; other objects are Jinja's own.
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (str, PLAIN_METHODS | {*LIMITED_METHODS}),
    (Mapping, frozenset(("get", "items", "keys", "values"))),
    ((list, tuple), frozenset(("count", "index"))),
    ((int, float, bytes), frozenset()),
)
_ESCAPED_CHARACTERS = 5  # the longest escape, "&#34;"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    code_generator_class = TimedGenerator

    def __init__(self, limit_seconds: float) -> None:
        self.limits = Limits(limit_seconds)
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock, TimedTokens])
        self.filters = FILTERS
        self.tests = {**TESTS}
        self.globals = dict(GLOBALS)

    def render(self, source: str, variables: Mapping[str, object]) -> str:
        """Return the text of a template; raise whatever Jinja or the template raises."""
        check_size(measure_size(variables))
        text = Template.from_code(self, compile_template(self, source), self.globals).render(variables)
        check_size(len(text))
        return text

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item of an object within the limits."""
        self.limits.check_time()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method of the template within the limits."""
        self.limits.check_time()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name in LIMITED_METHODS:
            options = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # others are Jinja's own
            return self.limits.count(LIMITED_METHODS[name](self.limits, owner, *args, **options))
        if isinstance(obj, LoopContext):  # a recursive loop
            args = tuple(self.limits.iterate(values) for values in args)
        return self.limits.count(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator within the limits."""
        are_numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        match operator:
            case "%" if isinstance(left, str):
                raise SecurityError("formatting with % is not allowed")
            case "-" | "%" if not are_numbers:
                raise TypeError(f"{operator} needs two numbers, not {type(left).__name__} and {type(right).__name__}")
            case "*" if not are_numbers:
                for repeated, times in ((left, right), (right, left)):
                    if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                        check_size(measure_size(repeated) * times)
            case "**" if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() * right)
            case "+" if isinstance(left, Markup) or isinstance(right, Markup):
                check_size(_ESCAPED_CHARACTERS * (measure_size(left) + measure_size(right)))
        return self.limits.count(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use this attribute."""
        for types, names in _METHODS:
            if isinstance(obj, types):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `call`, since Jinja's own version accepts any number as a width."""
