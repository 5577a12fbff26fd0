"""Render a trace as one HTML page: one head in detail, thumbnails of all heads, its softmax in steps, the logit lens.

    Path("page.html").write_text(render_page(trace.attention_views(), title="The cat sat"), encoding="utf-8")

The page opens on the head with the largest specific share (`attention_shares`), or on the selected one. Every head has
a thumbnail. Full matrices, rounded to 8 bits, are embedded up to a size limit: those of the selected layer and head
first, then those with the largest specific share.
"""

from collections.abc import Sequence
from typing import Any

from clearhead.errors import ClearheadError
from clearhead.inspection.colors import DARK, LIGHT, MASKED, shade_styles
from clearhead.inspection.document import EmbeddedArrays, html_document, read_asset
from clearhead.inspection.head_ranking import NO_SELECTION, HeadSelection, RankedHead, measure_shares, rank_heads
from clearhead.inspection.lens_table import LensTable
from clearhead.inspection.page_data import lens_data, view_data
from clearhead.inspection.token_labels import printable
from clearhead.inspection.views import AttentionView

_MAX_CELLS = 12_000_000  # of full matrices: about 22 MB of HTML, which a browser opens in about a second
_NUM_RANKED = 5  # heads that the page links to
_SCRIPTS = (
    "state",
    "colors",
    "arrays",
    "thumbnails",
    "matrix",
    "labels",
    "selection",
    "row",
    "lens",
    "summary",
    "page",
)


def render_page(
    views: Sequence[AttentionView],
    title: str,
    subtitle: str = "",
    lens: LensTable | None = None,
    selection: HeadSelection = NO_SELECTION,
    max_cells: int = _MAX_CELLS,
) -> str:
    """Return the HTML of a page; the lens belongs to the last queries of the first view."""
    _check_length(views, max_cells)
    arrays, shares = EmbeddedArrays(), measure_shares(views)
    ranking = rank_heads(views, shares)
    full_heads = _heads_that_fit(views, rank_heads(views, shares, selection), max_cells)
    data = {
        "title": _printable_line(title),
        "subtitle": _printable_line(subtitle),
        "ramps": {"light": LIGHT, "dark": DARK},
        "masked": MASKED,
        "start": _head_data(full_heads[0]),
        "ranking": [_head_data(head) for head in ranking[:_NUM_RANKED] if head.specific is not None],
        "num_heads": len(ranking),
        "views": [
            view_data(view, shares[number], _heads_of(number, full_heads), arrays) for number, view in enumerate(views)
        ],
        "lens": None if lens is None else lens_data(lens, arrays),
    }
    styles = read_asset("common.css") + read_asset("page.css") + shade_styles()
    script = "".join(read_asset(f"{name}.js") for name in _SCRIPTS)
    body = read_asset("page.html")
    return html_document(_printable_line(title), body, styles=styles, script=script, data=data, arrays=arrays)


def _printable_line(text: str) -> str:
    """Return prose as one line: as `printable` does, but spaces remain spaces."""
    return " ".join(printable(word) for word in text.split())


def _head_data(head: RankedHead) -> dict[str, Any]:
    """Return the JSON data of a head to open."""
    share = None if head.specific is None else round(head.specific, 3)
    return {
        "view": head.view,
        "layer": head.layer,
        "head": head.head,
        "specific": share,
        "row": head.row,
        "column": head.column,
    }


def _num_cells(view: AttentionView) -> int:
    return len(view.rows) * len(view.columns)


def _check_length(views: Sequence[AttentionView], max_cells: int) -> None:
    """Raise ClearheadError if no head of any view has at most `max_cells` cells."""
    smallest = min(views, key=_num_cells)
    if _num_cells(smallest) > max_cells:
        length = max(len(smallest.rows), len(smallest.columns))
        raise ClearheadError(
            f"a text of {length:,} tokens is too long for a page; shorten it, or save a .png or .safetensors file"
        )


def _heads_that_fit(
    views: Sequence[AttentionView], by_priority: Sequence[RankedHead], max_cells: int
) -> list[RankedHead]:
    """Return the heads whose full matrices fit into `max_cells`, in order of priority."""
    fitting = []
    for head in by_priority:
        if _num_cells(views[head.view]) <= max_cells:
            max_cells -= _num_cells(views[head.view])
            fitting.append(head)
    return fitting


def _heads_of(view: int, heads: Sequence[RankedHead]) -> set[tuple[int, int]]:
    """Return the (layer, head) pairs of one view."""
    return {(one.layer, one.head) for one in heads if one.view == view}
