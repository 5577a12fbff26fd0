"""docs/book.md explains every number of the book that the code refers to, and its modules and tests exist."""

import re
from pathlib import Path

import pytest

from clearhead.course.examples import worked_examples
from clearhead.course.statements import read_errata, read_parts
from clearhead.studies import ENTRIES
from tests.rules.source import FILES, ROOT

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "book.md").read_text(encoding="utf-8")
STATEMENTS = dict(re.findall(r"^\| ([A-F]\d+) \| (.*) \|$", PAGE, re.MULTILINE))
ERRATA = {int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
CITATION = re.compile(r"\bbook ((?:[A-F]\d+(?:, |-| and )?)+)")
ERRATUM = re.compile(r"\berrat(?:um|a) ((?:\d+(?:, | and )?)+)", re.IGNORECASE)
CODE = [*FILES, *(path for path in (REPOSITORY / "tests").rglob("*.py") if path != Path(__file__))]


def cited_statements(text: str) -> set[str]:
    return {number for group in CITATION.findall(text) for number in re.findall(r"[A-F]\d+", group)}


def cited_errata(text: str) -> set[int]:
    return {int(number) for group in ERRATUM.findall(text) for number in re.findall(r"\d+", group)}


def test_citations_are_found_in_text():
    assert cited_statements("(book A1-A10, C3)") == {"A1", "A10", "C3"}
    assert cited_errata("errata 5 and 8 of the book, erratum 10") == {5, 8, 10}


def test_every_cited_number_is_on_the_page():
    texts = {path: path.read_text(encoding="utf-8") for path in CODE}
    assert {path for path, text in texts.items() if not cited_statements(text) <= STATEMENTS.keys()} == set()
    assert {path for path, text in texts.items() if not cited_errata(text) <= ERRATA} == set()


def test_every_worked_example_is_on_the_page():
    numbers = {number for example in worked_examples() for number in example.number.split(", ")}
    assert numbers == STATEMENTS.keys()


def test_the_course_has_a_lesson_for_every_statement_with_the_code_that_the_page_names():
    lessons = {statement.number: statement for part in read_parts() for statement in part.statements}
    assert list(lessons) == list(STATEMENTS)
    for number, statement in lessons.items():
        assert statement.code == re.findall(r"`([\w/]+\.py)`", STATEMENTS[number])[0]


def test_the_course_has_an_exercise_for_every_erratum():
    assert {erratum.number for erratum in read_errata()} == ERRATA == set(range(1, 19))


@pytest.mark.parametrize("number", STATEMENTS)
def test_the_module_and_the_test_of_a_statement_exist(number):
    module, test = re.findall(r"`([\w/]+\.py)`", STATEMENTS[number])
    assert (ROOT / module).is_file()
    assert (REPOSITORY / test).is_file()


@pytest.mark.parametrize("number", STATEMENTS)
def test_the_test_of_a_statement_names_it(number):
    """By its number, such as E3, _e3_ or within E1 to E4."""
    _, test = re.findall(r"`([\w/]+\.py)`", STATEMENTS[number])
    text = (REPOSITORY / test).read_text(encoding="utf-8").upper()
    ranges = re.findall(rf"\b{number[0]}(\d+)(?:-| TO ){number[0]}(\d+)\b", text)
    within = any(int(first) <= int(number[1:]) <= int(last) for first, last in ranges)
    assert within or re.search(rf"(?<![A-Z0-9]){number}(?![A-Z0-9])", text), f"{test} does not name {number}"


def test_every_erratum_has_a_test_that_names_it():
    texts = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests" / "book").glob("*.py")]
    named = {int(number) for text in texts for number in re.findall(r"def test_erratum_(\d+)_", text)}
    assert named == ERRATA


def test_every_statement_has_a_study_and_the_page_lists_exactly_those_that_claim_to_show_it():
    listed = {number: re.findall(r"`(\w+)`", row.rpartition(" | ")[2]) for number, row in STATEMENTS.items()}
    shown = {number: [entry.name for entry in ENTRIES.values() if number in entry.statements] for number in STATEMENTS}
    assert all(listed.values())
    assert listed == shown
    assert {number for entry in ENTRIES.values() for number in entry.statements} <= STATEMENTS.keys()
