"""The worked examples of the book as one page, as tables in the terminal, or as data.

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

from clearhead.inspection import colours
from clearhead.inspection.document import asset, document
from clearhead.inspection.worked import Example, Panel, worked_examples

TITLE = "Attention, worked out"
LEAD = "Every number on this page was computed by Clearhead as the page was made, with the parts its networks use."

WIDE = 4  # columns: from here on a table may scroll on a telephone, also by the keyboard
CROWDED = 12  # columns: 80 characters hold no more than three decimals of each


@dataclass(frozen=True)
class Cell:
    """A number of a panel, and how it is coloured."""

    value: float
    share: float | None  # of the ramp; None: plain
    masked: bool

    def __str__(self) -> str:
        return "0" if self.value == 0 else f"{self.value:.4g}".replace("inf", "∞").replace("-", "−")

    @property
    def page_class(self) -> str:
        if self.share is None:
            return ""
        return f' class="{"masked" if self.masked else colours.shade_of(self.share)}"'

    @property
    def terminal_style(self) -> str:
        if self.masked or self.share is None:
            return "dim" if self.masked else ""
        ground = colours.mix(colours.DARK, self.share)
        return f"{colours.hexadecimal(colours.ink(ground))} on {colours.hexadecimal(ground)}"


def cells_of(panel: Panel) -> list[list[Cell]]:
    match panel.kind:
        case "weights":
            shares = colours.weight_shares(panel.values, highest=1.0).tolist()
        case "scores":
            shares = colours.score_shares(panel.values).tolist()
        case "numbers":
            shares = [[None] * panel.values.shape[1]] * len(panel.values)
    allowed = torch.ones_like(panel.values, dtype=torch.bool) if panel.allowed is None else panel.allowed
    rows = zip(panel.values.tolist(), shares, allowed.tolist(), strict=True)
    return [[Cell(value, share, not seen) for value, share, seen in zip(*row, strict=True)] for row in rows]


# --- as a page


def book_page() -> str:
    places = {f"example-{number}": example for number, example in enumerate(worked_examples())}
    contents = "\n".join(
        f'<li><a href="#{place}">{html.escape(example.title)}</a></li>' for place, example in places.items()
    )
    sections = "\n".join(section(place, example) for place, example in places.items())
    body = (
        f"<header><h1>{TITLE}</h1><p>{LEAD}</p></header>\n"
        f'<nav aria-label="Examples"><ol>\n{contents}\n</ol></nav>\n<main>\n{sections}\n</main>'
    )
    return document(TITLE, body, styles=asset("common.css") + asset("book.css") + colours.shade_styles())


def section(place: str, example: Example) -> str:
    panels = "\n".join(page_table(panel) for panel in example.panels)
    return (
        f'<section id="{place}" aria-labelledby="{place}-heading">\n'
        f'<h2 id="{place}-heading">{html.escape(example.title)} <small>{html.escape(example.statement)}</small></h2>\n'
        f'<p>{html.escape(example.words)}</p>\n<div class="panels">\n{panels}\n</div>\n</section>'
    )


def page_table(panel: Panel) -> str:
    lines = [f"<table><caption>{html.escape(panel.name)}</caption>"]
    if panel.columns:
        corner = "<td></td>" if panel.rows else ""
        heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in panel.columns)
        lines.append(f"<thead><tr>{corner}{heads}</tr></thead>")
    lines.append("<tbody>")
    for number, cells in enumerate(cells_of(panel)):
        head = f'<th scope="row">{html.escape(panel.rows[number])}</th>' if panel.rows else ""
        lines.append(f"<tr>{head}{''.join(f'<td{cell.page_class}>{cell}</td>' for cell in cells)}</tr>")
    table = "\n".join([*lines, "</tbody></table>"])
    if panel.values.shape[1] < WIDE:
        return table
    return f'<div class="scrolls" tabindex="0" role="region" aria-label="{html.escape(panel.name)}">\n{table}\n</div>'


# --- in the terminal


def print_book(console: Console) -> None:
    for example in worked_examples():
        console.print(f"\n[bold]{example.title}[/bold] [dim]{example.statement}[/dim]")
        console.print(example.words)
        console.print(Columns([terminal_table(panel) for panel in example.panels], padding=(1, 3)))


def terminal_table(panel: Panel) -> Table:
    drawn = Table(box=None, show_header=bool(panel.columns), padding=(0, 1, 0, 0), min_width=len(panel.name))
    drawn.title, drawn.title_justify = panel.name, "left"
    if panel.rows:
        drawn.add_column(style="dim")
    for number in range(panel.values.shape[1]):
        drawn.add_column(panel.columns[number] if panel.columns else "", justify="right")
    for number, cells in enumerate(cells_of(panel)):
        if len(cells) >= CROWDED:
            cells = [replace(cell, value=round(cell.value, 3)) for cell in cells]
        texts = [Text(str(cell), cell.terminal_style) for cell in cells]
        drawn.add_row(*([panel.rows[number]] if panel.rows else []), *texts)
    return drawn


# --- as data


def book_data() -> list[dict[str, Any]]:
    return [
        {
            "statement": example.statement,
            "title": example.title,
            "words": example.words,
            "panels": [panel_data(panel) for panel in example.panels],
        }
        for example in worked_examples()
    ]


def panel_data(panel: Panel) -> dict[str, Any]:
    """JSON has no infinity: null stands for it."""
    values = [[value if math.isfinite(value) else None for value in row] for row in panel.values.tolist()]
    return {"name": panel.name, "rows": list(panel.rows), "columns": list(panel.columns), "values": values}
