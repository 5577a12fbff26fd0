"""Test heatmaps in the terminal and as PNG, and their colors and labels."""

import io
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from clearhead.errors import ClearheadError
from clearhead.inspection.colors import (
    DARK,
    LIGHT,
    MASKED,
    NUM_SHADES,
    contrast,
    interpolate,
    score_intensities,
    shade_class,
    shade_styles,
    text_color,
    to_hex,
    weight_intensities,
)
from clearhead.inspection.heatmap import LABEL_WIDTH, has_colors, pool, render_heatmap
from clearhead.inspection.png import save_png
from clearhead.inspection.token_labels import printable

COLORS = st.tuples(*[st.integers(0, 255)] * 3)


def causal(length):
    return torch.ones(length, length).tril().softmax(dim=-1).tril()


def labels(length):
    return [f" w{number}" for number in range(length)]


def cell_colors(picture):
    """Return the (upper, lower) colors of every drawn character, line by line."""
    rows = {}
    line_of = [0]
    for char in picture.plain:
        line_of.append(line_of[-1] + (char == "\n"))
    for span in picture.spans:
        style = span.style
        pair = (tuple(style.color.triplet), tuple(style.bgcolor.triplet))
        rows.setdefault(line_of[span.start], []).extend([pair] * (span.end - span.start))
    return [rows[line] for line in sorted(rows)]


def test_a_small_matrix_takes_one_line_per_row_and_two_columns_per_cell():
    weights = causal(5)
    drawn = render_heatmap(weights, labels(5), labels(5), width=80)
    lines = drawn.plain.split("\n")
    assert [line[LABEL_WIDTH:] for line in lines[1:]] == ["▀" * 10] * 5
    assert [line.split()[:2] for line in lines[1:]] == [[str(row), f"␣w{row}"] for row in range(5)]
    intensities = weight_intensities(weights)
    for row, cells in enumerate(cell_colors(drawn)):
        assert cells == [
            (color, color) for value in intensities[row] for color in [interpolate(DARK, float(value))] * 2
        ]


@pytest.mark.parametrize(
    "text", [" 你好", "한국어로 말하는 사람", "🙂🙂🙂🙂🙂🙂🙂", "e\u0301a\u0308", "plain", "words without end"]
)
def test_cells_are_aligned_for_labels_in_any_script(text):
    lines = render_heatmap(causal(2), [text, "a"], [text, "a"], width=80).plain.split("\n")
    assert cell_len(lines[1].rstrip("▀")) == cell_len(lines[2].rstrip("▀")) == LABEL_WIDTH


def test_a_larger_matrix_takes_one_line_per_two_rows():
    weights = torch.rand(41, 41, generator=torch.Generator().manual_seed(0))
    drawn = render_heatmap(weights, labels(41), labels(41), width=80)
    intensities = weight_intensities(weights)
    lines = cell_colors(drawn)
    assert len(lines) == 21
    for line, cells in enumerate(lines[:20]):
        expected = zip(intensities[2 * line], intensities[2 * line + 1], strict=True)
        assert cells == [
            (interpolate(DARK, float(upper)), interpolate(DARK, float(lower))) for upper, lower in expected
        ]
    assert {lower for _, lower in lines[20]} == {DARK[0]}


@pytest.mark.parametrize("width", [30, 80])
def test_a_matrix_wider_than_the_terminal_is_max_pooled(width):
    weights = torch.zeros(300, 200)
    weights[299, 199] = 1.0
    drawn = render_heatmap(weights, labels(300), labels(200), width=width)
    assert max(map(len, drawn.plain.split("\n"))) <= width
    assert interpolate(DARK, 1.0) in cell_colors(drawn)[-1][-1]


def test_pool_equals_torch_max_pool2d():
    weights = torch.rand(40, 60, generator=torch.Generator().manual_seed(1)).double()
    assert torch.equal(pool(weights, 20, 20), torch.nn.functional.max_pool2d(weights[None], (2, 3))[0])


def test_a_weight_is_drawn_once_where_a_pool_has_one_or_two_columns():
    """Overlapping pools, as those of adaptive_max_pool2d, drew most columns of 71 tokens twice in 80 characters."""
    drawn = render_heatmap(torch.eye(71), labels(71), labels(71), width=80, colored=False)
    lines = [line[LABEL_WIDTH:] for line in drawn.plain.split("\n")[1:]]
    assert len(lines) == 71
    assert {line.count("█") for line in lines} == {1}
    positions = [line.index("█") for line in lines]
    assert (positions[0], positions[-1]) == (0, 62)
    assert positions == sorted(positions)
    ruler = drawn.plain.split("\n")[0]
    assert ruler[LABEL_WIDTH + 60 :].strip() == str(positions.index(60))


def test_the_ruler_shows_column_indices():
    lines = render_heatmap(torch.eye(12), labels(12), labels(12), width=80).plain.split("\n")
    assert lines[0][LABEL_WIDTH] == "0"
    assert lines[0][LABEL_WIDTH + 10] == "5"  # two characters per cell
    assert lines[0][LABEL_WIDTH + 20 :].split()[0] == "10"


def test_without_colors_shade_characters_are_used():
    drawn = render_heatmap(causal(4), labels(4), labels(4), colored=False)
    first, *_, last = (line[LABEL_WIDTH:] for line in drawn.plain.split("\n")[1:])
    assert first == "██      "
    assert set(last) <= set("░▒▓█")
    assert not drawn.spans


@pytest.mark.parametrize(("system", "escape", "seed"), [("truecolor", "38;2;", 1), ("256", "38;5;", 2)])
def test_colors_match_the_color_system_of_the_terminal(system, escape, seed):
    """Use new colors in each case, since rich caches how it wrote a style within one process."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=system, width=80, no_color=False)
    assert has_colors(console)
    weights = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
    console.print(render_heatmap(weights, labels(4), labels(4)))
    assert escape in console.file.getvalue()


@pytest.mark.parametrize("options", [{"color_system": None}, {"color_system": "standard"}, {"no_color": True}])
def test_a_terminal_with_few_colors_counts_as_without_colors(options):
    assert not has_colors(Console(file=io.StringIO(), force_terminal=True, **({"color_system": "256"} | options)))


# --- token labels


@given(st.text())
def test_printable_text_has_no_control_characters_spaces_or_line_breaks(text):
    shown = printable(text)
    assert shown.isprintable()
    assert " " not in shown


def test_escape_sequences_and_direction_marks_are_spelled_out():
    assert printable("\x1b[31m\u202e a\n") == "\\x1b[31m\\u202e␣a⏎"
    assert printable("abcdefgh", max_length=5) == "abcd…"


# --- colors


def test_contrast_follows_wcag():
    """#767676 is the lightest gray that passes on white: 4.54 (WCAG 2.2, §1.4.3, as widely quoted)."""
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((0x76,) * 3, (255,) * 3) == pytest.approx(4.54, abs=0.005)


@given(COLORS)
def test_text_color_has_enough_contrast_on_every_background(background):
    assert contrast(text_color(background), background) >= 4.5


def test_every_shade_has_a_class_in_both_themes():
    sheet = shade_styles()
    light, dark = sheet.split("@media")
    for step in range(NUM_SHADES):
        name = shade_class(step / (NUM_SHADES - 1))
        assert f".{name}{{background:{to_hex(interpolate(LIGHT, step / (NUM_SHADES - 1)))}" in light
        assert f".{name}{{background:{to_hex(interpolate(DARK, step / (NUM_SHADES - 1)))}" in dark
    assert to_hex(MASKED["light"]) in light
    assert to_hex(MASKED["dark"]) in dark


def test_weight_intensities_follow_the_square_root_and_score_intensities_are_linear():
    assert weight_intensities(torch.tensor([0.0, 0.04, 0.16])).tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert weight_intensities(torch.tensor([0.25]), highest=1.0).tolist() == [0.5]
    assert weight_intensities(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert score_intensities(torch.tensor([-1.0, 1.0, 3.0, -torch.inf])).tolist() == [0.0, 0.5, 1.0, 0.0]
    assert score_intensities(torch.tensor([2.0, 2.0])).tolist() == [0.5, 0.5]


# --- PNG


def test_png_contains_the_colors_of_the_weights(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    weights = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    texts = ["$x^2$", "猫"]  # formulas are not typeset, and a missing glyph raises no error
    pixels = image.imread(save_png(tmp_path / "map.png", {"head": weights}, texts, texts))[..., :3] * 255
    flat = pixels.reshape(-1, 3).round()
    for value in weights.flatten():
        expected = torch.tensor(interpolate(LIGHT, float(value) ** 0.5)).numpy()
        assert (abs(flat - expected).max(axis=1) <= 1.5).mean() > 0.02  # one of four squares


def test_png_of_all_heads_arranges_them_in_a_grid(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    matrices = {f"head {number}": causal(6) for number in range(5)}
    height, width, _ = image.imread(save_png(tmp_path / "map.png", matrices, labels(6), labels(6))).shape
    assert (width, height) == (1350, 900)  # three columns and two rows of three inches


@pytest.mark.parametrize(("length", "num_labels"), [(8, 8), (70, 70), (300, 100)])
def test_png_labels_are_kept_and_do_not_overlap(tmp_path, monkeypatch, length, num_labels):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    save = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure,
        "savefig",
        lambda self, *path, **options: (figures.append(self), save(self, *path, **options)),
    )
    save_png(tmp_path / "map.png", {"head": causal(length)}, labels(length), labels(length))
    (axes,) = figures[0].axes
    for axis, side in ((axes.yaxis, 1), (axes.xaxis, 0)):
        shown = axis.get_ticklabels()
        assert len(shown) == num_labels
        starts = sorted(label.get_window_extent().p0[side] for label in shown)
        ends = sorted(label.get_window_extent().p1[side] for label in shown)
        assert all(start > end - 2 for start, end in zip(starts[1:], ends, strict=False))


def test_save_png_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ClearheadError, match=r"clearhead\[plot\]"):
        save_png(tmp_path / "map.png", {"head": causal(2)}, labels(2), labels(2))
