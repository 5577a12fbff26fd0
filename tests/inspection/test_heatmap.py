"""Heatmaps in the terminal and as PNG, and the colours under both."""

import io
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from clearhead.errors import ClearheadError
from clearhead.inspection.colours import (
    DARK,
    LIGHT,
    MASKED,
    NUM_SHADES,
    contrast,
    hexadecimal,
    ink,
    mix,
    score_shares,
    shade_of,
    shade_styles,
    weight_shares,
)
from clearhead.inspection.heatmap import LABEL_WIDTH, has_colours, heatmap, pool
from clearhead.inspection.labels import visible
from clearhead.inspection.picture import save_png

COLOURS = st.tuples(*[st.integers(0, 255)] * 3)


def causal(length):
    return torch.ones(length, length).tril().softmax(dim=-1).tril()


def names(length):
    return [f" w{number}" for number in range(length)]


def grounds(picture):
    """(upper, lower) colours of every drawn character, line by line."""
    rows = {}
    line_of = [0]
    for letter in picture.plain:
        line_of.append(line_of[-1] + (letter == "\n"))
    for span in picture.spans:
        style = span.style
        pair = (tuple(style.color.triplet), tuple(style.bgcolor.triplet))
        rows.setdefault(line_of[span.start], []).extend([pair] * (span.end - span.start))
    return [rows[line] for line in sorted(rows)]


def test_a_small_matrix_has_a_line_for_each_row_and_two_columns_for_each_cell():
    weights = causal(5)
    drawn = heatmap(weights, names(5), names(5), width=80)
    lines = drawn.plain.split("\n")
    assert [line[LABEL_WIDTH:] for line in lines[1:]] == ["▀" * 10] * 5
    assert [line.split()[:2] for line in lines[1:]] == [[str(row), f"␣w{row}"] for row in range(5)]
    shares = weight_shares(weights)
    for row, cells in enumerate(grounds(drawn)):
        assert cells == [(colour, colour) for share in shares[row] for colour in [mix(DARK, float(share))] * 2]


@pytest.mark.parametrize(
    "text", [" 你好", "한국어로 말하는 사람", "🙂🙂🙂🙂🙂🙂🙂", "e\u0301a\u0308", "plain", "words without end"]
)
def test_cells_stand_below_each_other_whatever_the_script(text):
    lines = heatmap(causal(2), [text, "a"], [text, "a"], width=80).plain.split("\n")
    assert cell_len(lines[1].rstrip("▀")) == cell_len(lines[2].rstrip("▀")) == LABEL_WIDTH


def test_a_larger_one_has_two_rows_in_each_line():
    weights = torch.rand(41, 41, generator=torch.Generator().manual_seed(0))
    drawn = heatmap(weights, names(41), names(41), width=80)
    shares = weight_shares(weights)
    lines = grounds(drawn)
    assert len(lines) == 21
    for line, cells in enumerate(lines[:20]):
        expected = zip(shares[2 * line], shares[2 * line + 1], strict=True)
        assert cells == [(mix(DARK, float(upper)), mix(DARK, float(lower))) for upper, lower in expected]
    assert {lower for _, lower in lines[20]} == {DARK[0]}


@pytest.mark.parametrize("width", [30, 80])
def test_one_larger_than_the_terminal_is_pooled_and_keeps_the_largest(width):
    weights = torch.zeros(300, 200)
    weights[299, 199] = 1.0
    drawn = heatmap(weights, names(300), names(200), width=width)
    assert max(map(len, drawn.plain.split("\n"))) <= width
    assert mix(DARK, 1.0) in grounds(drawn)[-1][-1]


def test_pooling_is_that_of_torch():
    weights = torch.rand(40, 60, generator=torch.Generator().manual_seed(1)).double()
    assert torch.equal(pool(weights, 20), torch.nn.functional.max_pool2d(weights[None], (2, 3))[0])


def test_the_ruler_names_the_column_under_it():
    lines = heatmap(torch.eye(12), names(12), names(12), width=80).plain.split("\n")
    assert lines[0][LABEL_WIDTH] == "0"
    assert lines[0][LABEL_WIDTH + 10] == "5"  # two characters for a cell
    assert lines[0][LABEL_WIDTH + 20 :].split()[0] == "10"


def test_without_colours_shades_stand_for_them():
    drawn = heatmap(causal(4), names(4), names(4), coloured=False)
    first, *_, last = (line[LABEL_WIDTH:] for line in drawn.plain.split("\n")[1:])
    assert first == "██      "
    assert set(last) <= set("░▒▓█")
    assert not drawn.spans


@pytest.mark.parametrize(("system", "sign", "seed"), [("truecolor", "38;2;", 1), ("256", "38;5;", 2)])
def test_rich_gives_the_colours_the_terminal_has(system, sign, seed):
    """New colours each time: within one process rich remembers how it wrote a style."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=system, width=80, no_color=False)
    assert has_colours(console)
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
    console.print(heatmap(weights, names(4), names(4)))
    assert sign in console.file.getvalue()


@pytest.mark.parametrize("options", [{"color_system": None}, {"color_system": "standard"}, {"no_color": True}])
def test_few_colours_are_none(options):
    assert not has_colours(Console(file=io.StringIO(), force_terminal=True, **({"color_system": "256"} | options)))


# --- texts


@given(st.text())
def test_no_token_text_steers_the_terminal_or_breaks_a_line(text):
    shown = visible(text)
    assert shown.isprintable()
    assert " " not in shown


def test_escape_sequences_and_writing_direction_are_spelled_out():
    assert visible("\x1b[31m\u202e a\n") == "\\x1b[31m\\u202e␣a⏎"
    assert visible("abcdefgh", longest=5) == "abcd…"


# --- colours


def test_contrast_is_that_of_the_standard():
    """#767676 is the lightest grey that passes on white: 4.54 (WCAG 2.2, §1.4.3, as widely quoted)."""
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((0x76,) * 3, (255,) * 3) == pytest.approx(4.54, abs=0.005)


@given(COLOURS)
def test_ink_reads_on_every_ground(ground):
    assert contrast(ink(ground), ground) >= 4.5


def test_every_shade_has_a_class_in_both_themes():
    sheet = shade_styles()
    light, dark = sheet.split("@media")
    for step in range(NUM_SHADES):
        name = shade_of(step / (NUM_SHADES - 1))
        assert f".{name}{{background:{hexadecimal(mix(LIGHT, step / (NUM_SHADES - 1)))}" in light
        assert f".{name}{{background:{hexadecimal(mix(DARK, step / (NUM_SHADES - 1)))}" in dark
    assert hexadecimal(MASKED["light"]) in light
    assert hexadecimal(MASKED["dark"]) in dark


def test_shares_of_weights_grow_with_the_root_and_of_scores_linearly():
    assert weight_shares(torch.tensor([0.0, 0.04, 0.16])).tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert weight_shares(torch.tensor([0.25]), highest=1.0).tolist() == [0.5]
    assert weight_shares(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert score_shares(torch.tensor([-1.0, 1.0, 3.0, -torch.inf])).tolist() == [0.0, 0.5, 1.0, 0.0]
    assert score_shares(torch.tensor([2.0, 2.0])).tolist() == [0.5, 0.5]


# --- PNG


def test_png_shows_the_weights(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    texts = ["$x^2$", "猫"]  # mathematics is not set, and a missing glyph is no reason to fail
    pixels = image.imread(save_png(tmp_path / "map.png", {"head": weights}, texts, texts))[..., :3] * 255
    flat = pixels.reshape(-1, 3).round()
    for value in weights.flatten():
        expected = torch.tensor(mix(LIGHT, float(value) ** 0.5)).numpy()
        assert (abs(flat - expected).max(axis=1) <= 1.5).mean() > 0.02  # one of four squares


def test_png_of_a_whole_layer(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    matrices = {f"head {number}": causal(6) for number in range(5)}
    height, width, _ = image.imread(save_png(tmp_path / "map.png", matrices, names(6), names(6))).shape
    assert (width, height) == (1350, 900)  # three columns and two rows of three inches


def test_png_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ClearheadError, match=r"clearhead\[plot\]"):
        save_png(tmp_path / "map.png", {"head": causal(2)}, names(2), names(2))
