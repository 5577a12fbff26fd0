"""Test the worked examples of the book: every number against the golden values."""

import io
import json
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

from clearhead.inspection.book import book_data, book_page, panel_cells, print_book
from clearhead.inspection.book_examples import worked_examples
from tests.book.golden import golden, golden_value

EXAMPLES = {example.title: {panel.name: panel for panel in example.panels} for example in worked_examples()}

# title, panel, keys of its numbers in golden.json
ONE_HEAD, CACHE = "One head, from tokens to output", "Decoding with a cache"
GOLDEN = [
    (ONE_HEAD, "q = x·W_q", ("qkv", "q")),
    (ONE_HEAD, "k = x·W_k", ("qkv", "k")),
    (ONE_HEAD, "v = x·W_v", ("qkv", "v")),
    (ONE_HEAD, "scores = q·kᵀ", ("qkv", "scores")),
    (ONE_HEAD, "weights = softmax(scores)", ("qkv", "weights")),
    (ONE_HEAD, "output = weights·v", ("qkv", "output")),
    ("Two keys and the scale", "scores = q·kᵀ / √d", ("thinking", "scores")),
    ("Two keys and the scale", "weights", ("thinking", "weights")),
    ("Alignment between decoder and encoder", "scores = s·h", ("cross_attention", "scores")),
    ("Alignment between decoder and encoder", "weights", ("cross_attention", "weights")),
    ("Alignment between decoder and encoder", "context = Σ weight·h", ("cross_attention", "context")),
    ("The causal mask", "scores", ("masked_scores", "scores")),
    ("The causal mask", "weights", ("masked_scores", "causal_weights")),
    ("Heatmap A: uniform", "weights", ("heatmaps", "weights", "A")),
    ("Heatmap B: diagonal", "weights", ("heatmaps", "weights", "B")),
    ("Heatmap C: causal", "weights", ("heatmaps", "weights", "C")),
    ("Heatmap D: shifted", "weights", ("heatmaps", "weights", "D")),
    ("Temperature", "weights", ("temperature", "weights")),
    ("Sinusoidal positions", "encoding", ("sinusoidal", "table")),
    ("Counting without positions", "output", ("nope", "expected_first_column")),
    (CACHE, "outputs, token by token", ("kv_cache", "causal_scaled_output")),
    (CACHE, "outputs, in one pass", ("kv_cache", "causal_scaled_output")),
]


@pytest.mark.parametrize(("title", "panel", "keys"), GOLDEN)
def test_panels_equal_the_golden_values(title, panel, keys):
    values, expected = EXAMPLES[title][panel].values, golden(*keys)
    assert (values - expected.reshape(values.shape)).abs().max() <= 1e-12


def test_sinusoids_are_not_rounded_to_one():
    """The point of the example is that cos(1/100) is 0.99995 and not 1."""
    cells = panel_cells(EXAMPLES["Sinusoidal positions"]["encoding"])
    assert [str(cell) for cell in cells[1]] == ["0.841471", "0.540302", "0.00999983", "0.99995"]
    assert "0.99995" in book_page()


@pytest.mark.parametrize("name", ["A", "B", "C", "D"])
def test_heatmaps_use_the_scores_of_the_book(name):
    panels = next(panels for title, panels in EXAMPLES.items() if title.startswith(f"Heatmap {name}:"))
    assert torch.equal(panels["scores"].values, golden("heatmaps", "matrices", name))


def test_masking_after_the_softmax_leaves_rows_that_do_not_sum_to_one():
    sums = EXAMPLES["The causal mask"]["row sums"].values
    assert (sums[0] - 1).abs().max() <= 1e-12
    assert (sums[1] - golden("masked_scores", "row_sums_after")).abs().max() <= 1e-12


def test_receptive_field_and_key_projections_equal_the_golden_counts():
    field = EXAMPLES["Receptive field"]["inputs seen"].values
    assert field.tolist() == [
        golden_value("receptive_field", "size")[str(h)] for h in golden_value("receptive_field", "heads")
    ]
    counts = EXAMPLES["What a cache saves"]["key projections"].values
    assert counts[0].tolist() == golden_value("projections", "without_cache")
    assert counts[1].tolist() == golden_value("projections", "with_cache")


def test_the_cache_holds_the_keys_and_values_of_all_earlier_tokens():
    expected = torch.cat((golden("kv_cache", "k"), golden("kv_cache", "v")), dim=-1)
    for step in (1, 2, 3):
        assert torch.equal(EXAMPLES[CACHE][f"cache after token {step}"].values, expected[:step])


class Tables(HTMLParser):
    """Collect the captions and cells of every table, and all tags."""

    def __init__(self):
        super().__init__()
        self.tags, self.tables, self.open_tag = [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self.tables.append({"caption": "", "cells": [], "classes": []})
        if tag in ("td", "caption"):
            self.open_tag = tag
        if tag == "td" and self.tables:
            self.tables[-1]["cells"].append("")
            self.tables[-1]["classes"].append(dict(attributes).get("class"))

    def handle_endtag(self, tag):
        if tag == self.open_tag:
            self.open_tag = ""

    def handle_data(self, text):
        if self.open_tag == "caption":
            self.tables[-1]["caption"] += text
        elif self.open_tag == "td":
            self.tables[-1]["cells"][-1] += text


def test_the_page_contains_every_number_and_loads_nothing():
    page = Tables()
    page.feed(book_page())
    panels = [panel for example in worked_examples() for panel in example.panels]
    assert [table["caption"] for table in page.tables] == [panel.name for panel in panels]
    for table, panel in zip(page.tables, panels, strict=True):
        cells = [cell for row in panel_cells(panel) for cell in row]
        assert table["cells"][-len(cells) :] == [str(cell) for cell in cells]
    assert not [tag for tag, attributes in page.tags if tag == "script" or "src" in attributes]
    assert "http:" not in book_page() and "https:" not in book_page()  # noqa: PT018


def test_masked_cells_have_their_own_class_and_minus_infinity():
    cells = panel_cells(EXAMPLES["Heatmap C: causal"]["weights"])
    assert [cell.page_class for cell in cells[0]] == [' class="shade-20"', *[' class="masked"'] * 3]
    assert [str(cell) for cell in panel_cells(EXAMPLES["Heatmap C: causal"]["scores"])[0]] == ["5", "−∞", "−∞", "−∞"]


def test_book_data_is_json_with_unrounded_numbers():
    data = json.loads(json.dumps(book_data(), allow_nan=False))
    weights = next(panel for panel in data[0]["panels"] if panel["name"].startswith("weights"))
    assert weights["values"] == EXAMPLES[ONE_HEAD]["weights = softmax(scores)"].values.tolist()


def test_print_book_prints_every_example():
    console = Console(file=io.StringIO(), width=160)
    print_book(console)
    assert all(title in console.file.getvalue() for title in EXAMPLES)
    assert "0.3333" in console.file.getvalue()


def test_print_book_truncates_no_number_at_80_columns():
    console = Console(file=io.StringIO(), width=80)
    print_book(console)
    assert "…" not in console.file.getvalue()
