"""Show the parts of worked examples: as HTML tables, as tables in the terminal, or as JSON data.

print_book(TerminalConsole()); json.dumps(book_data())
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clearhead.course.drawing import chart_svg, image, matrix_png
from clearhead.course.examples import worked_examples
from clearhead.course.mathml import inline_html
from clearhead.course.parts import Chart, Example, Heatmap, Panel, Part, TextTable
from clearhead.inspection import colors

_MIN_SCROLLING_COLUMNS = 4  # wider tables can scroll on a phone, also with the keyboard
_LONG_HEADING = 12  # characters
_MIN_ROUNDED_COLUMNS = 12  # 80 characters have space for only three decimals per column then


@dataclass(frozen=True)
class Cell:
    """A number of a panel and its color."""

    value: float
    intensity: float | None  # on the color ramp; None: not colored
    masked: bool
    num_digits: int = 4

    def __str__(self) -> str:
        return "0" if self.value == 0 else f"{self.value:.{self.num_digits}g}".replace("inf", "∞").replace("-", "−")

    @property
    def page_class(self) -> str:
        """The class attribute of the cell in HTML."""
        if self.intensity is None:
            return ""
        return f' class="{"masked" if self.masked else colors.shade_class(self.intensity)}"'

    @property
    def terminal_style(self) -> str:
        """The Rich style of the cell in the terminal."""
        if self.masked or self.intensity is None:
            return "dim" if self.masked else ""
        background = colors.interpolate(colors.DARK, self.intensity)
        return f"{colors.to_hex(colors.text_color(background))} on {colors.to_hex(background)}"


def panel_cells(panel: Panel) -> list[list[Cell]]:
    """Return the rows of a panel with the color of every number."""
    match panel.kind:
        case "weights":
            intensities = colors.weight_intensities(panel.values, highest=1.0).tolist()
        case "scores":
            intensities = colors.score_intensities(panel.values).tolist()
        case "numbers":
            intensities = [[None] * panel.values.shape[1]] * len(panel.values)
    allowed = torch.ones_like(panel.values, dtype=torch.bool) if panel.allowed is None else panel.allowed
    rows = zip(panel.values.tolist(), intensities, allowed.tolist(), strict=True)
    return [
        [Cell(value, intensity, not seen, panel.num_digits) for value, intensity, seen in zip(*row, strict=True)]
        for row in rows
    ]


# --- HTML


def part_html(part: Part) -> str:
    """Return a table or a picture of an example."""
    match part:
        case Panel():
            return _panel_html(part)
        case TextTable():
            return _text_table_html(part)
        case Chart():
            return chart_svg(part)
        case Heatmap():
            rows, columns = part.values.shape
            description = f"{part.name}: {rows} {part.row_label}s down, {columns} entries across, blue 1, orange −1"
            picture = image(matrix_png(part.values), description)
            return f'<figure class="matrix"><figcaption>{html.escape(description)}</figcaption>{picture}</figure>'


def _panel_html(panel: Panel) -> str:
    """Return the table of a matrix."""
    rows = []
    for number, cells in enumerate(panel_cells(panel)):
        head = f'<th scope="row">{html.escape(panel.rows[number])}</th>' if panel.rows else ""
        rows.append(f"<tr>{head}{''.join(f'<td{cell.page_class}>{cell}</td>' for cell in cells)}</tr>")
    columns = ([""] if panel.rows else []) + list(panel.columns)
    return _table_html(panel.name, columns if panel.columns else [], rows, panel.values.shape[1])


def _text_table_html(table: TextTable) -> str:
    """Return a table of words, in which the first column names the rows."""
    rows = []
    for first, *others in table.cells:
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in others)
        rows.append(f'<tr><th scope="row">{inline_html(first)}</th>{cells}</tr>')
    return _table_html(table.name, table.columns, rows, len(table.columns), css_class="words")


def _table_html(name: str, columns: Sequence[str], rows: list[str], width: int, css_class: str = "") -> str:
    """Return a table with its caption, in a scrolling region if it is wide."""
    lines = [f'<table class="{css_class}">' if css_class else "<table>", f"<caption>{inline_html(name)}</caption>"]
    if columns:
        heads = "".join(f'<th scope="col">{html.escape(text)}</th>' if text else "<td></td>" for text in columns)
        lines.append(f"<thead><tr>{heads}</tr></thead>")
    table = "\n".join([*lines, "<tbody>", *rows, "</tbody></table>"])
    if width < _MIN_SCROLLING_COLUMNS and not css_class and max(map(len, columns), default=0) < _LONG_HEADING:
        return table
    return f'<div class="scrollable" tabindex="0" role="region" aria-label="{html.escape(name)}">\n{table}\n</div>'


# --- terminal


def print_book(console: Console) -> None:
    """Print all examples as tables. Charts and pictures are only on the page."""
    for example in worked_examples():
        console.print(f"\n[bold]{example.title}[/bold] [dim]{example.number}[/dim]")
        console.print(example.explanation, markup=False)
        tables = [_terminal_table(panel) for panel in example.panels if isinstance(panel, Panel | TextTable)]
        console.print(Columns(tables, padding=(1, 3)))


def _terminal_table(panel: Panel | TextTable) -> Table:
    """Return the Rich table of one part."""
    if isinstance(panel, TextTable):
        return _terminal_words(panel)
    table = Table(box=None, show_header=bool(panel.columns), padding=(0, 1, 0, 0), min_width=len(panel.name))
    table.title, table.title_justify = panel.name, "left"
    is_wide = panel.values.shape[1] >= _MIN_ROUNDED_COLUMNS
    row_names = [] if is_wide and panel.rows == panel.columns else panel.rows  # the columns already number the tokens
    if row_names:
        table.add_column(style="dim")
    for number in range(panel.values.shape[1]):
        table.add_column(panel.columns[number] if panel.columns else "", justify="right")
    for number, cells in enumerate(panel_cells(panel)):
        if is_wide:
            cells = [replace(cell, value=round(cell.value, 3)) for cell in cells]
        texts = [Text(str(cell), cell.terminal_style) for cell in cells]
        table.add_row(*([row_names[number]] if row_names else []), *texts)
    return table


def _terminal_words(words: TextTable) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), min_width=len(words.name))
    table.title, table.title_justify = words.name, "left"
    for column in words.columns:
        table.add_column(Text(column), overflow="fold")
    for row in words.cells:
        table.add_row(*map(Text, row))
    return table


# --- JSON


def book_data() -> list[dict[str, Any]]:
    """Return all examples as JSON data, with unrounded numbers."""
    return [_example_data(example) for example in worked_examples()]


def _example_data(example: Example) -> dict[str, Any]:
    return {
        "number": example.number,
        "title": example.title,
        "explanation": example.explanation,
        "panels": [_part_data(part) for part in example.panels],
    }


def _part_data(part: Part) -> dict[str, Any]:
    """Return one part as JSON data; null replaces infinity, which JSON does not have."""
    match part:
        case TextTable():
            return {"name": part.name, "columns": list(part.columns), "cells": [list(row) for row in part.cells]}
        case Chart():
            lines = {name: list(values) for name, values in part.lines.items()}
            return {"name": part.name, "x_label": part.x_label, "x": list(part.x), "lines": lines}
        case Heatmap():
            return {"name": part.name, "values": part.values.tolist()}
        case Panel():
            values = [[value if math.isfinite(value) else None for value in row] for row in part.values.tolist()]
            return {"name": part.name, "rows": list(part.rows), "columns": list(part.columns), "values": values}
