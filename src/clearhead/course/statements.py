"""The text of the course: parts, statements and errata, read from assets/*.toml.

parts = read_parts(); print(parts[0].statements[0].title)   # Queries, keys and values
"""

import tomllib
from dataclasses import dataclass

from clearhead.course.parts import read_asset

_LETTERS = "abcdef"


@dataclass(frozen=True, kw_only=True)
class Erratum:
    """A mistake of the documents as an exercise: what is claimed, and what is wrong with it."""

    number: int
    statement: str  # the number of the statement that it belongs to
    claim: str
    mistake: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement of the book as a lesson."""

    number: str
    title: str
    text: str  # paragraphs, separated by empty lines
    formulas: list[str]  # in the notation of `to_mathml`
    question: str
    answer: str
    code: str  # the file below src/clearhead that implements it
    widget: str | None = None  # a name of `widgets`


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the book, from A to F."""

    letter: str
    title: str
    text: str
    statements: list[Statement]


def read_parts() -> list[Part]:
    """Return all parts in order."""
    parts = []
    for letter in _LETTERS:
        data = tomllib.loads(read_asset(f"{letter}.toml"))
        statements = [Statement(**each) for each in data["statement"]]
        parts.append(Part(letter=letter.upper(), title=data["title"], text=data["text"], statements=statements))
    return parts


def read_errata() -> list[Erratum]:
    """Return all errata in order."""
    return [Erratum(**each) for each in tomllib.loads(read_asset("errata.toml"))["erratum"]]
