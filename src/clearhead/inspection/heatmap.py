"""Draw a matrix as a heatmap in the terminal with half blocks: each character shows two cells, one above the other.

    Console().print(render_heatmap(weights, rows=["I", "am"], columns=["I", "am"], width=80))

      0 I     ▀▀          In a small matrix a cell takes two columns and one line, in a large one a column and half a
      1 am    ▀▀▀▀        line. A larger matrix is max-pooled: a cell shows the largest of a few neighboring values.

Rich converts the colors to what the terminal supports: true color or 256. Without colors, five shades are used.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor

from clearhead.inspection.colors import DARK, interpolate, weight_intensities
from clearhead.inspection.token_labels import printable

LABEL_WIDTH = 16
_MIN_MAX_ROWS = 100  # rows that are never pooled: a terminal scrolls down, but not to the side
_SHADES = " ░▒▓█"


def render_heatmap(
    values: Tensor, rows: Sequence[str], columns: Sequence[str], width: int = 80, colored: bool = True
) -> Text:
    """Return a heatmap of values (T, S), with a label for each row and column, at most `width` characters wide."""
    assert values.shape == (len(rows), len(columns))
    available = max(width - LABEL_WIDTH - 1, 8)
    pooled = pool(values, max(available, _MIN_MAX_ROWS), available)
    cell_width = 2 if max(pooled.shape) * 2 <= available else 1
    picture = Text(_ruler(len(columns), pooled.shape[1], cell_width), no_wrap=True)
    rows_per_line = 1 if cell_width == 2 or not colored else 2
    cells = weight_intensities(pooled).tolist()
    for first in range(0, len(cells), rows_per_line):
        picture.append("\n" + _row_label(first, len(cells), rows))
        upper = cells[first]
        lower = upper if rows_per_line == 1 else cells[first + 1] if first + 1 < len(cells) else [0.0] * len(upper)
        for above, below in zip(upper, lower, strict=True):
            picture.append_text(_half_blocks(above, below, cell_width) if colored else shade(above, cell_width))
    return picture


def pool(values: Tensor, max_rows: int, max_columns: int) -> Tensor:
    """Return the matrix max-pooled to at most `max_rows` and `max_columns`; every value belongs to exactly one cell."""
    return _pool_rows(_pool_rows(values, max_rows).T, max_columns).T


def _pool_rows(values: Tensor, max_rows: int) -> Tensor:
    """Return the matrix with neighboring rows max-pooled, if there are more than `max_rows`."""
    num_rows = len(values)
    if num_rows <= max_rows:
        return values
    starts = [_first_of_pool(cell, num_rows, max_rows) for cell in range(max_rows + 1)]
    return torch.stack([values[start:end].amax(dim=0) for start, end in pairwise(starts)])


def _first_of_pool(cell: int, num_values: int, num_cells: int) -> int:
    """Return the first of the values that a cell shows."""
    return -(-cell * num_values // num_cells)


def _half_blocks(above: float, below: float, count: int) -> Text:
    """Return `count` half blocks with the colors of two intensities, one above the other."""
    foreground, background = (Color.from_rgb(*interpolate(DARK, intensity)) for intensity in (above, below))
    return Text("▀" * count, Style(color=foreground, bgcolor=background))


def shade(intensity: float, count: int) -> Text:
    """Return `count` shade characters for an intensity."""
    return Text(_SHADES[round(intensity * (len(_SHADES) - 1))] * count)


def _row_label(row: int, num_shown: int, rows: Sequence[str]) -> str:
    """Return the label of a row, cut and padded by display width: a Chinese character takes two columns."""
    number = _first_of_pool(row, len(rows), num_shown)
    text = Text(printable(rows[number]))
    text.truncate(LABEL_WIDTH - 6, overflow="ellipsis", pad=True)
    return f"{number:>4} {text.plain} "


def _ruler(num_columns: int, num_shown: int, cell_width: int) -> str:
    """Return a line with the column index above every tenth character."""
    line = [" "] * (LABEL_WIDTH + num_shown * cell_width)
    for offset in range(0, num_shown * cell_width, 10):
        number = str(_first_of_pool(offset // cell_width, num_columns, num_shown))
        line[LABEL_WIDTH + offset : LABEL_WIDTH + offset + len(number)] = number
    return "".join(line).rstrip()


def has_colors(console: Console) -> bool:
    """Return whether the console has enough colors for a ramp: 16 are too few."""
    return not console.no_color and console.color_system in ("truecolor", "256")
