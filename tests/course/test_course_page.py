"""Test the page of the course: complete, self-contained, well-formed, with the numbers of the examples and sliders."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from clearhead.course import book_page
from clearhead.course.examples import worked_examples
from clearhead.course.mathml import inline_html, to_mathml
from clearhead.course.panels import panel_cells
from clearhead.course.parts import Panel, TextTable
from clearhead.course.statements import read_errata, read_parts
from clearhead.course.widgets import make_widgets
from clearhead.errors import ClearheadError
from clearhead.studies import ENTRIES
from tests.book.golden import golden, golden_value

VOID = {"meta", "link", "img", "input", "br"}
STATEMENTS = [statement for part in read_parts() for statement in part.statements]


class Reader(HTMLParser):
    """Collect tags, anchors, captions and table cells, and check that tags are closed in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.stack, self.tables, self.text = [], [], [], []
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.stack.append(tag)
        if tag == "table":
            self.tables.append({"caption": "", "cells": []})
        if tag == "td":
            self.tables[-1]["cells"].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, text):
        self.text.append(text)
        if "caption" in self.stack:
            self.tables[-1]["caption"] += text
        elif "td" in self.stack:
            self.tables[-1]["cells"][-1] += text


@pytest.fixture(scope="module")
def page():
    return book_page()


@pytest.fixture(scope="module")
def reader(page):
    return Reader(page)


def test_every_statement_is_a_lesson_in_order(reader):
    articles = [attributes["id"] for tag, attributes in reader.tags if tag == "article"]
    assert articles == [statement.number for statement in STATEMENTS]
    assert [number[0] for number in articles] == sorted(number[0] for number in articles)
    assert len(articles) == 33


def test_every_lesson_has_formula_question_answer_numbers_code_and_study(page):
    lessons = dict(re.findall(r'<article id="(\w+)"(.*?)</article>', page, re.DOTALL))
    for statement in STATEMENTS:
        lesson = lessons[statement.number]
        for part in ("<math ", "Question.", "<summary>Answer</summary>", '<div class="panels">', "clearhead study "):
            assert part in lesson, (statement.number, part)
        assert f"src/clearhead/{statement.code}" in lesson
        assert len(statement.answer) > 8


def test_every_erratum_is_an_exercise_of_its_statement(page):
    lessons = dict(re.findall(r'<article id="(\w+)"(.*?)</article>', page, re.DOTALL))
    for erratum in read_errata():
        assert f"(erratum {erratum.number})" in lessons[erratum.statement]
    assert page.count("Spot the mistake.") == 18


def test_the_page_contains_every_number(reader):
    parts = [part for example in worked_examples() for part in example.panels]
    tables = {}
    for table in reader.tables:
        tables.setdefault(table["caption"], []).append(table["cells"])
    for part in parts:
        if isinstance(part, Panel):
            cells = [str(cell) for row in panel_cells(part) for cell in row]
        elif isinstance(part, TextTable):
            cells = [text for row in part.cells for text in row[1:]]
        else:
            continue
        caption = part.name.replace("_", "")  # W_q has a subscript on the page
        assert any(found[-len(cells) :] == cells for found in tables[caption]), part.name


def test_the_page_loads_nothing_and_allows_only_its_own_script_and_styles(page, reader):
    sources = [attributes[name] for _, attributes in reader.tags for name in ("src", "href") if name in attributes]
    assert all(source.startswith(("data:", "#")) for source in sources)
    without_namespaces = page.replace("http-equiv", "")
    assert "http:" not in without_namespaces
    assert "https:" not in page
    assert not [tag for tag, attributes in reader.tags if "style" in attributes]  # the policy would block them
    policy = next(attributes["content"] for tag, attributes in reader.tags if attributes.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def test_links_and_labels_point_to_existing_elements(reader):
    identities = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(identities) == len(set(identities))
    links = [attributes["href"][1:] for tag, attributes in reader.tags if tag == "a"]
    labels = [attributes["for"] for tag, attributes in reader.tags if tag == "label"]
    assert len(links) > 60
    assert set(links + labels) <= set(identities)


def test_every_slider_and_choice_has_a_frame_for_each_stop():
    for name, widget in make_widgets().items():
        count = 1
        for control in widget.controls:
            count *= len(control.stops)
            assert 0 <= control.start < len(control.stops)
        assert len(widget.frames) == count, name


def test_the_temperature_slider_shows_the_golden_weights():
    widget = make_widgets()["temperature"]
    stops = [float(stop) for stop in widget.controls[0].stops]
    for temperature, expected in zip(
        golden_value("temperature", "temperatures"), golden("temperature", "weights"), strict=True
    ):
        found = torch.tensor(widget.frames[stops.index(temperature)].values[0], dtype=torch.float64)
        assert (found - expected).abs().max() <= 1e-12


def test_the_rope_sliders_rotate_and_ignore_a_common_shift():
    widget = make_widgets()["rope"]
    frequencies, positions, distances = ([float(stop) for stop in control.stops] for control in widget.controls)
    values = torch.tensor([frame.values for frame in widget.frames], dtype=torch.float64)
    values = values.reshape(len(frequencies), len(positions), len(distances), 2, 2)
    scores = values.prod(dim=-2).sum(dim=-1)
    assert (scores - scores[:, :1]).abs().max() <= 1e-6  # the angles are float64 of a rounded base
    angle = torch.atan2(values[..., 1, 1], values[..., 1, 0])[:, :, 0]  # of the key
    expected = torch.tensor(frequencies)[:, None] * torch.tensor(positions) + torch.atan2(
        torch.tensor(0.6), torch.tensor(0.8)
    )
    assert ((angle - expected + torch.pi) % (2 * torch.pi) - torch.pi).abs().max() <= 1e-4


def test_the_mask_choice_shows_the_golden_weights():
    """The first six tokens of the book's matrix; masking first does not depend on what comes later."""
    weights = torch.tensor(make_widgets()["mask"].frames[0].values, dtype=torch.float64)
    assert (weights - golden("masked_scores", "causal_weights")[:6, :6]).abs().max() <= 1e-12


def test_the_script_gets_the_frames_of_all_widgets(page):
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert data.keys() == make_widgets().keys() == {statement.widget for statement in STATEMENTS} - {None}


def test_pictures_of_studies_are_embedded_once_each(tmp_path):
    for name in ENTRIES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "picture.png").write_bytes(b"\x89PNG" + name.encode())
        (tmp_path / name / "table.json").write_text(json.dumps({"verdict": f"verdict <{name}>"}), encoding="utf-8")
    page = book_page(tmp_path)
    Reader(page)
    for name in ENTRIES:
        assert page.count(f'id="study-{name}"') == 1
        assert f"verdict &lt;{name}&gt;" in page


def test_a_folder_without_studies_is_refused(tmp_path):
    with pytest.raises(ClearheadError, match="run: clearhead study all --out"):
        book_page(tmp_path)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("a_i^2", "<msubsup><mi>a</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"\frac{1}{d}", "<mfrac><mrow><mn>1</mn></mrow><mrow><mi>d</mi></mrow></mfrac>"),
        (r"\sqrt{d_k}", "<msqrt><mrow><msub><mi>d</mi><mi>k</mi></msub></mrow></msqrt>"),
        (
            "(X)_i",
            '<msub><mrow><mo stretchy="false">(</mo><mi>X</mi><mo stretchy="false">)</mo></mrow><mi>i</mi></msub>',
        ),
        ("(a]", "<mo>(</mo><mi>a</mi><mo>]</mo>"),
        (r"\text{two~words}<3", "<mtext>two words</mtext><mo>&lt;</mo><mn>3</mn>"),
        (r"\sum_j a", '<munder><mo largeop="true" movablelimits="false">∑</mo><mi>j</mi></munder><mi>a</mi>'),
    ],
)
def test_formulas_become_mathml(formula, expected):
    assert to_mathml(formula) == f'<math display="block"><mrow>{expected}</mrow></math>'


def test_subscripts_follow_latin_and_greek_letters():
    assert inline_html("W_q, XW_q and ω_i, but `a_b`") == (
        "W<sub>q</sub>, XW<sub>q</sub> and ω<sub>i</sub>, but <code>a_b</code>"
    )


@pytest.mark.parametrize("formula", ["{a", "a}", r"\frac{a}", "a_", r"\text{a"])
def test_incomplete_formulas_are_refused(formula):
    with pytest.raises(ClearheadError):
        to_mathml(formula)
