"""A Jinja environment for templates that nobody has checked: no hang, no flood, no way out.

    LimitedSandbox(limit_seconds=1.0).fill("{{ greeting }}!", {"greeting": "hello"})   # 'hello!'

Jinja's sandbox keeps a template from Python's internals. Here every loop turn, call, filter and operator
also looks at the clock, and every value made is weighed: before it is made, where it could be huge. What
could run long within a single step (`center`, `format`, `%` on text) is left out.
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

from clearhead.tokenization.chat_filters import GLOBALS, GUARDED_FILTERS, METHODS, PLAIN_FILTERS
from clearhead.tokenization.chat_limits import (
    MAX_TEMPLATE_CHARACTERS,
    Limits,
    TemplateLimitError,
    require_bits,
    require_size,
    size_of,
)


class LimitedSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, limit_seconds: float) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock])
        self.filters = {**PLAIN_FILTERS, **GUARDED_FILTERS}
        self.globals = dict(GLOBALS)
        self.limits = Limits(limit_seconds)

    def fill(self, source: str, variables: Mapping[str, object]) -> str:
        """The text of a template; raises what Jinja or the template's own steps raise."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TemplateLimitError(f"it has {len(source)} characters, and {MAX_TEMPLATE_CHARACTERS} are allowed")
        require_size(size_of(variables))
        text = Template.from_code(self, _compiled(source), self.globals).render(variables)
        require_size(len(text))
        return text

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.limits.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        given = {key: value for key, value in kwargs.items() if not key.startswith("_")}  # others are Jinja's own
        if isinstance(owner, str) and name == "join":
            result = GUARDED_FILTERS["join"](context, *args, owner, **given)
        elif isinstance(owner, str) and name == "replace":
            result = GUARDED_FILTERS["replace"](context, owner, *args, **given)
        else:
            result = super().call(context, obj, *args, **kwargs)
        return self.limits.admit(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed")
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, (str, list, tuple)) and isinstance(times, int):
                    require_size(size_of(repeated) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            require_bits(left.bit_length() * right)
        return self.limits.admit(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kinds, names in METHODS:
            if isinstance(obj, kinds):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to `is_safe_attribute`, which refuses it: its widths may be any number."""


class GenerationBlock(Extension):
    """`{% generation %}`, which marks an assistant's text for training, changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares no class variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=16)
def _compiled(source: str) -> CodeType:
    environment = LimitedSandbox(limit_seconds=0.0)
    template = environment.parse(source)
    Guards().generic_visit(template)
    return environment.compile(template)


class Guards(NodeTransformer):
    """Sends every loop, every text written and every value made through one of the guard filters."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node)
        match node:
            case nodes.For():
                node.iter = _guarded(node.iter, "watched")
            case nodes.Output():
                node.nodes = [_guarded(child, "written") for child in node.nodes]
            case nodes.Concat():
                joined = _guarded(nodes.List(node.nodes, lineno=node.lineno), "join")
                return _guarded(joined, "admitted")
            case nodes.List() | nodes.Dict() | nodes.Filter():
                return _guarded(node, "admitted")
            case nodes.Tuple(ctx="load") | nodes.Getitem(arg=nodes.Slice()):
                return _guarded(node, "admitted")
            case nodes.NSRef() if node.attr.startswith("_"):
                raise SecurityError(f"the name {node.attr!r} starts with an underscore")
        return node


def _guarded(node: nodes.Node, guard: str) -> nodes.Filter:
    return nodes.Filter(node, guard, [], [], None, None, lineno=node.lineno)
