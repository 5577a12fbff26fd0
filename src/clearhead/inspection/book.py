"""Present the worked examples of the book as one HTML page, as tables in the terminal, or as JSON data.

Path("book.html").write_text(book_page(), encoding="utf-8")
"""

import html
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clearhead.inspection import colors
from clearhead.inspection.book_examples import worked_examples
from clearhead.inspection.book_parts import Example, Panel
from clearhead.inspection.html_document import html_document, read_asset

_TITLE = "Attention, worked out"
_LEAD = "Clearhead computed every number on this page when it wrote the page, with the modules that its networks use."

_MIN_SCROLLING_COLUMNS = 4  # wider tables can scroll on a phone, also with the keyboard
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


def book_page() -> str:
    """Return the HTML page with all examples."""
    examples = {f"example-{number}": example for number, example in enumerate(worked_examples())}
    contents = "\n".join(
        f'<li><a href="#{anchor}">{html.escape(example.title)}</a></li>' for anchor, example in examples.items()
    )
    sections = "\n".join(section(anchor, example) for anchor, example in examples.items())
    body = (
        f"<header><h1>{_TITLE}</h1><p>{_LEAD}</p></header>\n"
        f'<nav aria-label="Examples"><ol>\n{contents}\n</ol></nav>\n<main>\n{sections}\n</main>'
    )
    styles = read_asset("common.css") + read_asset("book.css") + colors.shade_styles()
    return html_document(_TITLE, body, styles=styles)


def section(anchor: str, example: Example) -> str:
    """Return the HTML section of one example."""
    panels = "\n".join(_page_table(panel) for panel in example.panels)
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-heading">\n'
        f'<h2 id="{anchor}-heading">{html.escape(example.title)} <small>{html.escape(example.number)}</small></h2>\n'
        f'<p>{html.escape(example.explanation)}</p>\n<div class="panels">\n{panels}\n</div>\n</section>'
    )


def _page_table(panel: Panel) -> str:
    """Return the HTML table of one panel, in a scrolling region if it is wide."""
    lines = [f"<table><caption>{html.escape(panel.name)}</caption>"]
    if panel.columns:
        corner = "<td></td>" if panel.rows else ""
        heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in panel.columns)
        lines.append(f"<thead><tr>{corner}{heads}</tr></thead>")
    lines.append("<tbody>")
    for number, cells in enumerate(panel_cells(panel)):
        head = f'<th scope="row">{html.escape(panel.rows[number])}</th>' if panel.rows else ""
        lines.append(f"<tr>{head}{''.join(f'<td{cell.page_class}>{cell}</td>' for cell in cells)}</tr>")
    table = "\n".join([*lines, "</tbody></table>"])
    if panel.values.shape[1] < _MIN_SCROLLING_COLUMNS:
        return table
    return (
        f'<div class="scrollable" tabindex="0" role="region" aria-label="{html.escape(panel.name)}">\n{table}\n</div>'
    )


# --- terminal


def print_book(console: Console) -> None:
    """Print all examples as tables."""
    for example in worked_examples():
        console.print(f"\n[bold]{example.title}[/bold] [dim]{example.number}[/dim]")
        console.print(example.explanation)
        console.print(Columns([_terminal_table(panel) for panel in example.panels], padding=(1, 3)))


def _terminal_table(panel: Panel) -> Table:
    """Return the Rich table of one panel."""
    table = Table(box=None, show_header=bool(panel.columns), padding=(0, 1, 0, 0), min_width=len(panel.name))
    table.title, table.title_justify = panel.name, "left"
    if panel.rows:
        table.add_column(style="dim")
    for number in range(panel.values.shape[1]):
        table.add_column(panel.columns[number] if panel.columns else "", justify="right")
    for number, cells in enumerate(panel_cells(panel)):
        if len(cells) >= _MIN_ROUNDED_COLUMNS:
            cells = [replace(cell, value=round(cell.value, 3)) for cell in cells]
        texts = [Text(str(cell), cell.terminal_style) for cell in cells]
        table.add_row(*([panel.rows[number]] if panel.rows else []), *texts)
    return table


# --- JSON


def book_data() -> list[dict[str, Any]]:
    """Return all examples as JSON data, with unrounded numbers."""
    return [
        {
            "number": example.number,
            "title": example.title,
            "explanation": example.explanation,
            "panels": [_panel_data(panel) for panel in example.panels],
        }
        for example in worked_examples()
    ]


def _panel_data(panel: Panel) -> dict[str, Any]:
    """Return one panel as JSON data; null replaces infinity, which JSON does not have."""
    values = [[value if math.isfinite(value) else None for value in row] for row in panel.values.tolist()]
    return {"name": panel.name, "rows": list(panel.rows), "columns": list(panel.columns), "values": values}
