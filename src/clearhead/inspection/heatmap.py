"""A matrix as a heatmap in the terminal, by half blocks: each character shows two cells, one above the other.

    Console().print(heatmap(weights, rows=["I", "am"], columns=["I", "am"], width=80))

      0 I     ▀▀          a small matrix takes two columns and one line for a cell, a large one a column and half a
      1 am    ▀▀▀▀        line; one that is larger still is pooled, and a cell shows the largest value of its pool

Rich turns the colours into what the terminal has: true colour or 256. Without colours five shades stand for them.
"""

from collections.abc import Sequence

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from clearhead.inspection.colours import DARK, mix, weight_shares
from clearhead.inspection.labels import visible

LABEL_WIDTH = 16
SHADES = " ░▒▓█"


def heatmap(
    values: Tensor, rows: Sequence[str], columns: Sequence[str], width: int = 80, coloured: bool = True
) -> Text:
    """values (T, S), with a text for each row and column; at most `width` characters wide."""
    assert values.shape == (len(rows), len(columns))
    room = max(width - LABEL_WIDTH - 1, 8)
    pooled = pool(values, room)
    zoom = 2 if max(pooled.shape) * 2 <= room else 1
    picture = Text(ruler(len(columns), pooled.shape[1], zoom), no_wrap=True)
    lines_of_cells = 1 if zoom == 2 or not coloured else 2
    cells = weight_shares(pooled).tolist()
    for first in range(0, len(cells), lines_of_cells):
        picture.append("\n" + row_label(first, len(cells), rows))
        upper = cells[first]
        lower = upper if lines_of_cells == 1 else cells[first + 1] if first + 1 < len(cells) else [0.0] * len(upper)
        for above, below in zip(upper, lower, strict=True):
            picture.append_text(half_blocks(above, below, zoom) if coloured else shade(above, zoom))
    return picture


def pool(values: Tensor, longest: int) -> Tensor:
    """At most `longest` rows and columns: neighbours share a cell, which keeps their largest value."""
    shape = min(values.shape[0], longest), min(values.shape[1], longest)
    if shape == tuple(values.shape):
        return values
    return adaptive_max_pool2d(values.double()[None], shape)[0]


def half_blocks(above: float, below: float, count: int) -> Text:
    style = Style(color=Color.from_rgb(*mix(DARK, above)), bgcolor=Color.from_rgb(*mix(DARK, below)))
    return Text("▀" * count, style)


def shade(share: float, count: int) -> Text:
    return Text(SHADES[round(share * (len(SHADES) - 1))] * count)


def row_label(row: int, num_shown: int, rows: Sequence[str]) -> str:
    """Cut and filled up by the columns it takes: two for each Chinese character."""
    number = row * len(rows) // num_shown
    text = Text(visible(rows[number]))
    text.truncate(LABEL_WIDTH - 6, overflow="ellipsis", pad=True)
    return f"{number:>4} {text.plain} "


def ruler(num_columns: int, num_shown: int, zoom: int) -> str:
    """The number of every tenth character's column, above it."""
    line = [" "] * (LABEL_WIDTH + num_shown * zoom)
    for place in range(0, num_shown * zoom, 10):
        number = str(place // zoom * num_columns // num_shown)
        line[LABEL_WIDTH + place : LABEL_WIDTH + place + len(number)] = number
    return "".join(line).rstrip()


def has_colours(console: Console) -> bool:
    """Enough for a ramp: sixteen are not."""
    return not console.no_color and console.color_system in ("truecolor", "256")
