"""Render a trace as one HTML page: thumbnails of all heads, one head in detail, its softmax in steps, the logit lens.

    Path("page.html").write_text(render_page(trace.attention_views(), title="The cat sat"), encoding="utf-8")

The page displays the numbers it is given, in float32, and computes none. Every head has a thumbnail. Full matrices are
embedded up to a size limit, those of the selected layer and head first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from clearhead.errors import ClearheadError
from clearhead.inspection.colors import DARK, LIGHT, MASKED, shade_styles, weight_intensities
from clearhead.inspection.html_document import EmbeddedArrays, html_document, read_asset
from clearhead.inspection.lens_table import LensTable
from clearhead.inspection.token_labels import printable
from clearhead.inspection.views import AttentionView

_MAX_CELLS = 6_000_000  # of full matrices: 64 MB of HTML, which a browser opens in about a second
_SCRIPTS = ("state", "colors", "thumbnails", "matrix", "row", "lens", "page")
THUMBNAIL_SIZE = 36  # maximum number of cells per side, one for each pixel it is displayed with


@dataclass(frozen=True)
class HeadSelection:
    """The layer and head to show; None leaves the choice open."""

    layer: int | None = None
    head: int | None = None

    def priority(self, layer: int, head: int) -> tuple[bool, bool]:
        """Return a sort key that puts the selected layer first, and the selected head first within a layer."""
        return self.layer not in (None, layer), self.head not in (None, head)


NO_SELECTION = HeadSelection()


def render_page(
    views: Sequence[AttentionView],
    title: str,
    subtitle: str = "",
    lens: LensTable | None = None,
    selection: HeadSelection = NO_SELECTION,
    max_cells: int = _MAX_CELLS,
) -> str:
    """Return the HTML of a page; the lens belongs to the last queries of the first view."""
    arrays = EmbeddedArrays()
    full_heads = _heads_that_fit(views, selection, max_cells)
    data = {
        "title": _printable_line(title),
        "subtitle": _printable_line(subtitle),
        "ramps": {"light": LIGHT, "dark": DARK},
        "masked": MASKED,
        "start": {"layer": selection.layer or 0, "head": selection.head or 0},
        "views": [_view_data(view, arrays, heads) for view, heads in zip(views, full_heads, strict=True)],
        "lens": None if lens is None else _lens_data(lens, arrays),
    }
    styles = read_asset("common.css") + read_asset("page.css") + shade_styles()
    script = "".join(read_asset(f"{name}.js") for name in _SCRIPTS)
    body = read_asset("page.html")
    return html_document(_printable_line(title), body, styles=styles, script=script, data=data, arrays=arrays)


def _printable_line(text: str) -> str:
    """Return prose as one line: as `printable` does, but spaces remain spaces."""
    return " ".join(printable(word) for word in text.split())


def _heads_that_fit(
    views: Sequence[AttentionView], selection: HeadSelection, max_cells: int
) -> list[set[tuple[int, int]]]:
    """Return for each view the (layer, head) pairs whose full matrices fit into `max_cells`, selected ones first."""
    queue = sorted(
        (selection.priority(layer, head), number, layer, head)
        for number, view in enumerate(views)
        for layer, count in enumerate(view.num_heads)
        for head in range(count)
    )
    fitting: list[set[tuple[int, int]]] = [set() for _ in views]
    for _, number, layer, head in queue:
        max_cells -= len(views[number].rows) * len(views[number].columns)
        if max_cells < 0:
            break
        fitting[number].add((layer, head))
    if not any(fitting):
        length = max(len(views[0].rows), len(views[0].columns))
        raise ClearheadError(
            f"a text of {length:,} tokens is too long for a page; shorten it, or save a .png or .safetensors file"
        )
    return fitting


def _view_data(view: AttentionView, arrays: EmbeddedArrays, full_heads: set[tuple[int, int]]) -> dict[str, Any]:
    """Return the JSON data of one view."""
    masks = _SharedMasks(arrays)
    return {
        "title": view.title,
        "rows": [printable(text) for text in view.rows],
        "columns": [printable(text) for text in view.columns],
        "layers": [_layer_data(view, layer, arrays, masks, full_heads) for layer in range(len(view.num_heads))],
    }


def _layer_data(
    view: AttentionView, layer: int, arrays: EmbeddedArrays, masks: "_SharedMasks", full_heads: set[tuple[int, int]]
) -> dict[str, Any]:
    """Return the JSON data of one layer: thumbnails of all heads, and the matrices of those in `full_heads`."""
    matrices = view.matrices(layer, None)
    heads: list[dict[str, Any]] = [{} for _ in matrices.weights]
    for head in (head for number, head in sorted(full_heads) if number == layer):
        heads[head]["weights"] = arrays.add(matrices.weights[head].float())
        if matrices.scores is not None:
            heads[head]["scores"] = arrays.add(matrices.scores[head].float())
    return {
        "number": layer,
        "thumbnails": arrays.add(thumbnails(matrices.weights.float())),
        "allowed": masks.add(matrices.allowed) if matrices.allowed is not None and any(heads) else None,
        "heads": heads,
    }


def thumbnails(weights: Tensor) -> Tensor:
    """Max-pool weights (N, T, S) to at most 36 × 36 and return their intensities as bytes."""
    shape = min(weights.shape[1], THUMBNAIL_SIZE), min(weights.shape[2], THUMBNAIL_SIZE)
    pooled = adaptive_max_pool2d(weights, shape)
    return torch.stack([(weight_intensities(head) * 255).round().to(torch.uint8) for head in pooled])


class _SharedMasks:
    """Embed each distinct mask once; most layers have the same one."""

    def __init__(self, arrays: EmbeddedArrays) -> None:
        self.arrays = arrays
        self.embedded: list[tuple[Tensor, dict[str, Any]]] = []

    def add(self, allowed: Tensor) -> dict[str, Any]:
        """Return the reference to a mask, embedding it if it is new."""
        for mask, reference in self.embedded:
            if torch.equal(mask, allowed):
                return reference
        self.embedded.append((allowed, self.arrays.add(allowed.to(torch.uint8))))
        return self.embedded[-1][1]


def _lens_data(lens: LensTable, arrays: EmbeddedArrays) -> dict[str, Any]:
    """Return the JSON data of the lens; each text is stored once, and `places` are indices into the texts."""
    token_ids, places = lens.tokens.unique(return_inverse=True)
    return {
        "stages": lens.stages,
        "texts": [printable(lens.token_text(token)) for token in token_ids.tolist()],
        "places": arrays.add(places.to(torch.int32)),
        "probabilities": arrays.add(lens.probabilities.float()),
    }
