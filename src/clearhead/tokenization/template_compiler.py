"""Compile a chat template to Python code that checks the limits at every loop, comparison, output and new value.

    code = compile_template(environment, "{{ greeting }}!")   # for jinja2.Template.from_code

Parsing, code generation and Python's own compiler take more time and memory than most templates do later, so they have
limits too: the clock runs from the first token on, and the nesting and the size of the generated code are limited.
"""

from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from jinja2 import Environment, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from clearhead.tokenization.template_limits import MAX_TEMPLATE_CHARACTERS, Limits, TemplateLimitError

# Python's compiler takes about half a second and 100 MB for this much; templates in use need at most a third of it.
_MAX_CODE_CHARACTERS = 1 << 20
# Python's parser accepts 200 nested parentheses; templates in use nest about 20 expressions and statements.
_MAX_DEPTH = 150
# A chain of `elif` is nested for Python's compiler.
_MAX_BRANCHES = 200
# Jinja copies its table of names for each block; templates in use have 100 names and 300 blocks at most.
_MAX_NAMES_TIMES_BLOCKS = 1 << 19
_COMPILED: dict[str, CodeType] = {}
_MAX_COMPILED = 16
# Other statements read files, or change how output is escaped.
_STATEMENTS = (
    *(nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.With),
    *(nodes.Block, nodes.ExprStmt, nodes.Assign, nodes.AssignBlock, nodes.Continue, nodes.Break, nodes.Scope),
)


def compile_template(environment: Environment, source: str) -> CodeType:
    """Return the code of a template; raise TemplateLimitError if compiling it exceeds the limits of the environment."""
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateLimitError(f"it has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed")
    code = _COMPILED.get(source)
    if code is None:
        limits = _limits_of(environment)
        template = environment.parse(source)
        _LimitInserter(limits).visit(template)
        python = environment.compile(template, raw=True)
        if len(python) > _MAX_CODE_CHARACTERS:
            raise TemplateLimitError(f"it compiles to more than {_MAX_CODE_CHARACTERS} characters of code")
        limits.check_time()
        code = compile(python, "<template>", "exec")
        if len(_COMPILED) >= _MAX_COMPILED:
            _COMPILED.clear()
        _COMPILED[source] = code
    return code


def _limits_of(environment: Environment) -> Limits:
    limits: Limits = environment.limits  # type: ignore[attr-defined]
    return limits


class TimedGenerator(CodeGenerator):
    """Generates code, checking the time before each node."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Write the code of a node."""
        _limits_of(self.environment).check_time()
        return super().visit(node, *args, **kwargs)


class TimedTokens(Extension):
    """Checks the time before each token."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        """Yield the tokens of a template."""
        return _limits_of(self.environment).iterate(stream)


class GenerationBlock(Extension):
    """Accepts `{% generation %}`, which marks an assistant's text for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja does not declare it as a class variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the contents of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _LimitInserter(NodeTransformer):
    """Passes every loop, comparison, piece of output and new value through one of the limiting filters.

    Calls, binary operators, items and attributes go through methods of the environment, which check the limits there.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._depth = 0
        self._names: set[str] = set()
        self._num_blocks = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        """Return a node with limits in it and around it."""
        self._limits.check_time()
        if isinstance(node, nodes.Stmt) and not isinstance(node, _STATEMENTS):
            raise SecurityError(f"the statement {type(node).__name__.lower()!r} is not allowed")
        if isinstance(node, nodes.If) and len(node.elif_) > _MAX_BRANCHES:
            raise TemplateLimitError(f"it has an `if` with more than {_MAX_BRANCHES} branches")
        if isinstance(node, nodes.Name):
            self._names.add(node.name)
        self._num_blocks += isinstance(node, nodes.Stmt) and not isinstance(node, nodes.Output)
        if len(self._names) * self._num_blocks > _MAX_NAMES_TIMES_BLOCKS:
            raise TemplateLimitError(
                f"it has {len(self._names)} names and {self._num_blocks} blocks, which are too many to compile"
            )
        if self._depth > _MAX_DEPTH:
            raise TemplateLimitError(f"it nests expressions and statements more than {_MAX_DEPTH} deep")
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return _with_limits(node)


def _with_limits(node: nodes.Node) -> nodes.Node:
    match node:
        case nodes.For():
            node.iter = _with_filter(node.iter, "limit_loop")
        case nodes.Output():
            node.nodes = [_with_filter(child, "limit_output") for child in node.nodes]
        case nodes.Concat():
            return _with_filter(nodes.List(node.nodes, lineno=node.lineno), "join")
        case nodes.Compare():
            operands = [each for item in node.ops for each in (nodes.Const(item.op, lineno=item.lineno), item.expr)]
            return _with_filter(node.expr, "compare", operands)
        case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load") | nodes.Getitem(arg=nodes.Slice()):
            return _with_filter(node, "limit_value")
        case nodes.NSRef() if node.attr.startswith("_"):
            raise SecurityError(f"the name {node.attr!r} starts with an underscore")
    return node


def _with_filter(node: nodes.Node, name: str, arguments: Sequence[nodes.Node] = ()) -> nodes.Filter:
    return nodes.Filter(node, name, [*arguments], [], None, None, lineno=node.lineno)
