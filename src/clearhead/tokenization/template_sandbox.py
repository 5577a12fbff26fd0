"""A Jinja environment for untrusted templates, with limits on time and memory.

    TemplateSandbox(limit_seconds=1.0).render("{{ greeting }}!", {"greeting": "hello"})   # 'hello!'

Jinja's own sandbox keeps a template away from Python's internals. In addition, every loop iteration, call, filter and
operator checks the time here, and the size of every new value is checked: before it is created, if it could be huge.
Operations whose single step could take long (`center`, `format`, `%` on strings) are not available.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from clearhead.tokenization.template_filters import GLOBALS, LIMITED_FILTERS, METHODS, PLAIN_FILTERS
from clearhead.tokenization.template_limits import (
    MAX_TEMPLATE_CHARACTERS,
    Limits,
    TemplateLimitError,
    check_bits,
    check_size,
    measure_size,
)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters = {**PLAIN_FILTERS, **LIMITED_FILTERS}
        self.globals = dict(GLOBALS)
        self.limits = Limits(limit_seconds)

    def render(self, source: str, variables: Mapping[str, object]) -> str:
        """Return the text of a template; raise whatever Jinja or the template raises."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateLimitError(f"it has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed")
        check_size(measure_size(variables))
        text = Template.from_code(self, _compile(source), self.globals).render(variables)
        check_size(len(text))
        return text

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method of the template within the limits."""
        self.limits.check_time()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        options = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # others are Jinja's own
        if isinstance(owner, str) and name == "join":
            result = LIMITED_FILTERS["join"](context, *args, owner, **options)
        elif isinstance(owner, str) and name == "replace":
            result = LIMITED_FILTERS["replace"](context, owner, *args, **options)
        else:
            result = super().call(context, obj, *args, **kwargs)
        return self.limits.count(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator within the limits."""
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed")
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                    check_size(measure_size(repeated) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * right)
        return self.limits.count(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use this attribute."""
        for types, names in METHODS:
            if isinstance(obj, types):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `is_safe_attribute`, which forbids it because its widths may be any number."""


class _GenerationBlock(Extension):
    """Accepts `{% generation %}`, which marks an assistant's text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja does not declare it as a class variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the contents of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=16)
def _compile(source: str) -> CodeType:
    environment = TemplateSandbox(limit_seconds=0.0)
    template = environment.parse(source)
    _LimitInserter().generic_visit(template)
    return environment.compile(template)


class _LimitInserter(NodeTransformer):
    """Passes every loop, every piece of output and every new value through one of the limiting filters."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Return a node with limits in it and around it."""
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _with_filter(node.iter, "limit_loop")
            case nodes.Output():
                node.nodes = [_with_filter(child, "limit_output") for child in node.nodes]
            case nodes.Concat():
                joined = _with_filter(nodes.List(node.nodes, lineno=node.lineno), "join")
                return _with_filter(joined, "limit_value")
            case nodes.List() | nodes.Dict() | nodes.Filter():
                return _with_filter(node, "limit_value")
            case nodes.Tuple(ctx="load") | nodes.Getitem(arg=nodes.Slice()):
                return _with_filter(node, "limit_value")
            case nodes.NSRef() if node.attr.startswith("_"):
                raise SecurityError(f"the name {node.attr!r} starts with an underscore")
        return node


def _with_filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
