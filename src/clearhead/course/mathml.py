"""Write formulas as MathML, which browsers typeset without a library, and text with subscripts as HTML.

    to_mathml(r"\\frac{QK^T}{\\sqrt{d_k}}")   # '<math display="block"><mrow><mfrac>...'

The input is a small part of TeX: letters, numbers, operators, groups in braces, `^`, `_`, and the commands below. A
word after a backslash that is not a command is a function name such as `\\softmax`.
"""

import html
import re
from collections.abc import Callable

from clearhead.errors import ClearheadError

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\s+|.")
_SYMBOLS = {
    "cdot": "·",
    "times": "×",
    "le": "≤",
    "ge": "≥",
    "ne": "≠",
    "to": "→",
    "sim": "∼",
    "approx": "≈",
    "in": "∈",
    "sum": "∑",
    "prod": "∏",
    "infty": "∞",
    "dots": "…",
    "odot": "⊙",
    "otimes": "⊗",
    "mid": "|",
    "pm": "±",
    "alpha": "α",
    "beta": "β",
    "delta": "δ",
    "theta": "θ",
    "mu": "μ",
    "sigma": "σ",
    "omega": "ω",
    "phi": "φ",
    "ell": "ℓ",
    "Delta": "Δ",
    "gets": "←",
    "partial": "∂",
}
_IDENTIFIERS = set("αβδθμσωφℓΔ")
_LARGE = set("∑∏")
_FENCES = {"(": ")", "[": "]"}


def to_mathml(formula: str) -> str:
    """Return a formula as a MathML element of its own line; raise ClearheadError if its braces do not match."""
    tokens = [token for token in _TOKEN.findall(formula) if not token.isspace()]
    parser = _Parser(tokens)
    content = parser.row(end=None)
    return f'<math display="block"><mrow>{content}</mrow></math>'


def inline_html(text: str) -> str:
    """Return text as HTML, with `code` between backquotes, and subscripts after a letter (W_q) or a product (XW_q)."""
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\b((?:[A-Za-z](?=[A-Z]_))?[A-Za-zα-ω])_(\w{1,5})\b(?![^<]*</code>)", r"\1<sub>\2</sub>", escaped)


class _Parser:
    """Read tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    def row(self, end: str | None) -> str:
        """Return all parts up to the token `end`, or up to the end of the formula."""
        parts = []
        while (token := self._peek()) != end:
            if token is None or token == "}":
                raise ClearheadError(f"the braces of the formula {' '.join(self._tokens)} do not match")
            parts.append(self._scripted())
        self._place += 1
        return "".join(parts)

    def _peek(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _scripted(self) -> str:
        """Return one part with its subscript and superscript."""
        is_large = self._tokens[self._place] in ("\\sum", "\\prod")
        base, scripts = self._atom(), {}
        while (token := self._peek()) in ("_", "^"):
            self._place += 1
            scripts[token] = self._atom()
        names = {"_": ("munder", "msub"), "^": ("mover", "msup"), "_^": ("munderover", "msubsup")}
        kind = "".join(mark for mark in "_^" if mark in scripts)
        if not kind:
            return base
        name = names[kind][0 if is_large else 1]
        return f"<{name}>{base}{''.join(scripts[mark] for mark in kind)}</{name}>"

    def _atom(self) -> str:
        """Return one part without scripts."""
        token = self._peek()
        if token is None:
            raise ClearheadError("the formula ends where a part is expected")
        self._place += 1
        if token == "{":
            return f"<mrow>{self.row(end='}')}</mrow>"
        if token in _FENCES and self._is_closed(token):
            return self._fenced(token, _FENCES[token])
        if not token.startswith("\\"):
            return _leaf(token)
        name = token[1:]
        if name in _COMMANDS:
            return _COMMANDS[name](self)
        if name in _SYMBOLS:
            return _leaf(_SYMBOLS[name])
        return f"<mo>{html.escape(name)}</mo>" if len(name) == 1 else f"<mi>{name}</mi>"

    def _is_closed(self, opening: str) -> bool:
        """Return whether the parenthesis before this place is closed before the end of its group."""
        depth = {opening: 1, "{": 0}
        for token in self._tokens[self._place :]:
            if token in depth:
                depth[token] += 1
            elif token == _FENCES[opening]:
                depth[opening] -= 1
            elif token == "}":
                depth["{"] -= 1
            if depth[opening] == 0 or depth["{"] < 0:
                break
        return depth[opening] == 0

    def _fenced(self, opening: str, closing: str) -> str:
        """Return a part in parentheses as one part, which a script belongs to; they are tall around fractions only."""
        content = self.row(end=closing)
        stretchy = "" if "<mfrac>" in content else ' stretchy="false"'
        return f"<mrow><mo{stretchy}>{opening}</mo>{content}<mo{stretchy}>{closing}</mo></mrow>"

    def fraction(self) -> str:
        """Return the fraction of the next two parts."""
        return f"<mfrac>{self._atom()}{self._atom()}</mfrac>"

    def root(self) -> str:
        """Return the square root of the next part."""
        return f"<msqrt>{self._atom()}</msqrt>"

    def text(self) -> str:
        """Return the next group as upright words."""
        words = []
        self._place += 1  # the opening brace
        while (token := self._peek()) != "}":
            if token is None:
                raise ClearheadError("the text of the formula does not end")
            words.append(token)
            self._place += 1
        self._place += 1
        return f"<mtext>{html.escape(' '.join(_join_words(words)))}</mtext>"

    def space(self) -> str:
        """Return a wide space."""
        return '<mspace width="1.2em"></mspace>'


def _join_words(characters: list[str]) -> list[str]:
    """Return the words of single characters; `~` separates them, since the tokens have no spaces."""
    return "".join(characters).split("~")


_COMMANDS: dict[str, Callable[[_Parser], str]] = {
    "frac": _Parser.fraction,
    "sqrt": _Parser.root,
    "text": _Parser.text,
    "quad": _Parser.space,
}


def _leaf(token: str) -> str:
    """Return a number, a letter or an operator."""
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token.isalpha() or token in _IDENTIFIERS:
        return f"<mi>{token}</mi>"
    if token == "~":
        return '<mspace width="0.35em"></mspace>'
    if token in _LARGE:
        return f'<mo largeop="true" movablelimits="false">{token}</mo>'
    return f"<mo>{html.escape('−' if token == '-' else token)}</mo>"
