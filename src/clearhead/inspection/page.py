"""One HTML page to look into a model: every head small, one head large, its softmax in steps, the logit lens.

    Path("page.html").write_text(page(views_of(trace), title="The cat sat"), encoding="utf-8")

The page shows the numbers it is given, in float32, and computes none. Every head has a thumbnail; its matrices come
along while the page has room for them, those of the layer and head asked for before all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from clearhead.errors import ClearheadError
from clearhead.inspection.colours import DARK, LIGHT, MASKED, shade_styles, weight_shares
from clearhead.inspection.document import Arrays, asset, document
from clearhead.inspection.labels import visible
from clearhead.inspection.views import Lens, View

MOST_CELLS = 6_000_000  # of matrices in full: 64 MB of HTML, which a browser opens in about a second
SCRIPTS = ("state", "colours", "thumbnails", "matrix", "row", "lens", "page")
THUMBNAIL = 36  # cells at most on a side, one for each pixel it is shown with


@dataclass(frozen=True)
class HeadSelection:
    """What the reader asked for; None: no wish."""

    layer: int | None = None
    head: int | None = None

    def distance(self, layer: int, head: int) -> tuple[bool, bool]:
        return self.layer not in (None, layer), self.head not in (None, head)


NO_WISH = HeadSelection()


def page(
    views: Sequence[View],
    title: str,
    subtitle: str = "",
    lens: Lens | None = None,
    chosen: HeadSelection = NO_WISH,
    most_cells: int = MOST_CELLS,
) -> str:
    """The lens belongs to the last queries of the first view."""
    arrays = Arrays()
    full = heads_in_full(views, chosen, most_cells)
    data = {
        "title": visible_line(title),
        "subtitle": visible_line(subtitle),
        "ramps": {"light": LIGHT, "dark": DARK},
        "masked": MASKED,
        "start": {"layer": chosen.layer or 0, "head": chosen.head or 0},
        "views": [view_data(view, arrays, full[number]) for number, view in enumerate(views)],
        "lens": None if lens is None else lens_data(lens, arrays),
    }
    styles = asset("common.css") + asset("page.css") + shade_styles()
    script = "".join(asset(f"{name}.js") for name in SCRIPTS)
    return document(visible_line(title), asset("page.html"), styles=styles, script=script, data=data, arrays=arrays)


def visible_line(text: str) -> str:
    """Prose: its spaces stay spaces."""
    return " ".join(visible(word) for word in text.split())


def heads_in_full(views: Sequence[View], chosen: HeadSelection, most_cells: int) -> list[set[tuple[int, int]]]:
    """For each view the (layer, head) whose matrices fit into `most_cells`, the nearest to what was chosen first."""
    queue = sorted(
        (chosen.distance(layer, head), number, layer, head)
        for number, view in enumerate(views)
        for layer, count in enumerate(view.num_heads)
        for head in range(count)
    )
    full: list[set[tuple[int, int]]] = [set() for _ in views]
    for _, number, layer, head in queue:
        most_cells -= len(views[number].rows) * len(views[number].columns)
        if most_cells < 0:
            break
        full[number].add((layer, head))
    if not any(full):
        length = max(len(views[0].rows), len(views[0].columns))
        raise ClearheadError(
            f"a text of {length:,} tokens is too long for a page; shorten it, or save a .png or a .safetensors file"
        )
    return full


def view_data(view: View, arrays: Arrays, full: set[tuple[int, int]]) -> dict[str, Any]:
    masks = Masks(arrays)
    return {
        "title": view.title,
        "rows": [visible(text) for text in view.rows],
        "columns": [visible(text) for text in view.columns],
        "layers": [layer_data(view, layer, arrays, masks, full) for layer in range(len(view.num_heads))],
    }


def layer_data(view: View, layer: int, arrays: Arrays, masks: "Masks", full: set[tuple[int, int]]) -> dict[str, Any]:
    seen = view.look(layer, None)
    heads: list[dict[str, Any]] = [{} for _ in seen.weights]
    for head in (head for number, head in sorted(full) if number == layer):
        heads[head]["weights"] = arrays.add(seen.weights[head].float())
        if seen.scores is not None:
            heads[head]["scores"] = arrays.add(seen.scores[head].float())
    return {
        "number": layer,
        "thumbnails": arrays.add(thumbnails(seen.weights.float())),
        "allowed": masks.add(seen.allowed) if seen.allowed is not None and any(heads) else None,
        "heads": heads,
    }


def thumbnails(weights: Tensor) -> Tensor:
    """(N, T, S) -> (N, at most 36, at most 36) as bytes; a cell of a large matrix is the largest of its pool."""
    shape = min(weights.shape[1], THUMBNAIL), min(weights.shape[2], THUMBNAIL)
    small = adaptive_max_pool2d(weights, shape)
    return torch.stack([(weight_shares(head) * 255).round().to(torch.uint8) for head in small])


class Masks:
    """Layers mostly see alike: each mask stands in the page once."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.known: list[tuple[Tensor, dict[str, Any]]] = []

    def add(self, allowed: Tensor) -> dict[str, Any]:
        for mask, reference in self.known:
            if torch.equal(mask, allowed):
                return reference
        self.known.append((allowed, self.arrays.add(allowed.to(torch.uint8))))
        return self.known[-1][1]


def lens_data(lens: Lens, arrays: Arrays) -> dict[str, Any]:
    """Each text once: a token is its place in the list of texts."""
    known, places = lens.tokens.unique(return_inverse=True)
    return {
        "stages": lens.stages,
        "texts": [visible(lens.text_of(token)) for token in known.tolist()],
        "places": arrays.add(places.to(torch.int32)),
        "probabilities": arrays.add(lens.probabilities.float()),
    }
