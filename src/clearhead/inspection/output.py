"""A trace as a file of the kind its name says, as a heatmap in the terminal, or as data.

write(traced, Path("page.html"), HeadSelection(layer=3))
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.files import check_output, write_text
from clearhead.inspection.document import framed
from clearhead.inspection.heads import index
from clearhead.inspection.heatmap import has_colours, heatmap
from clearhead.inspection.labels import visible
from clearhead.inspection.page import NO_WISH, HeadSelection, page
from clearhead.inspection.picture import save_png
from clearhead.inspection.trace import Trace
from clearhead.inspection.views import Lens, View, views_of

MOST_NOTEBOOK_CELLS = 8_000_000  # computed at all: 170 tokens of SmolLM2, about a second
NOTEBOOK_CELLS = 500_000  # held in full: 5 MB in the notebook's file
PAGE_LENS = 128  # tokens: ten seconds for SmolLM2 on one core


@dataclass(frozen=True)
class Shown:
    """The layer, and the head or all of them, that a picture of one layer is about."""

    view: View
    layer: int
    head: int | None
    weights: Tensor  # (N, T, S), or (1, T, S) of one head

    @property
    def title(self) -> str:
        which = f"mean of {len(self.weights)} heads" if self.head is None else f"head {self.head}"
        return f"{self.view.title}, layer {self.layer}, {which}"


def shown(trace: Trace, chosen: HeadSelection) -> Shown:
    """The last layer unless another is chosen; of an encoder-decoder the look across."""
    views = views_of(trace)
    view = views[0] if len(views) == 1 else views[1]
    count = len(view.num_heads)
    layer = index("layer", count - 1 if chosen.layer is None else chosen.layer, count)
    head = None if chosen.head is None else index("head", chosen.head, view.num_heads[layer])
    return Shown(view, layer, head, view.look(layer, head).weights.float())


def write(trace: Trace, path: Path, chosen: HeadSelection, lens: Lens | None = None) -> None:
    check_path(path, chosen, lens is not None)
    WRITERS[path.suffix.lower()](trace, path, chosen, lens)


def check_path(path: Path, chosen: HeadSelection, with_lens: bool) -> None:
    """Before a model is read: there is a writer, and it heeds all that was asked for."""
    check_output(path, WRITERS)
    kind = path.suffix.lower()
    if with_lens and kind != ".html":
        raise ClearheadError(f"the lens does not go into a {kind} file; write an .html page or print it")
    if chosen != NO_WISH and kind == ".safetensors":
        raise ClearheadError("a .safetensors file holds every layer and head; leave out which")


def write_page(trace: Trace, path: Path, chosen: HeadSelection, lens: Lens | None) -> None:
    subtitle = f"{trace.num_layers} layers, {len(trace.tokens)} tokens"
    write_text(path, page(views_of(trace), heading(trace), subtitle, lens, in_range(trace, chosen)))


def notebook(trace: Trace) -> str | None:
    """The page as the output of a notebook cell, in a frame of its own; None where it would be slow or large."""
    views = views_of(trace)
    sizes = [len(view.rows) * len(view.columns) for view in views]
    computed = sum(size * sum(view.num_heads) for size, view in zip(sizes, views, strict=True))
    if computed > MOST_NOTEBOOK_CELLS or max(sizes) > NOTEBOOK_CELLS:
        return None
    return framed(page(views, heading(trace), repr(trace), most_cells=NOTEBOOK_CELLS), height_pixels=860)


def heading(trace: Trace) -> str:
    text = "".join(trace.token_texts)
    return text if len(text) <= 80 else f"{text[:79]}…"


def write_picture(trace: Trace, path: Path, chosen: HeadSelection, lens: Lens | None) -> None:
    found = shown(trace, chosen)
    matrices = {f"layer {found.layer}, head {head}": matrix for head, matrix in enumerate(found.weights)}
    if found.head is not None:
        matrices = {found.title: found.weights[0]}
    save_png(path, matrices, found.view.rows, found.view.columns)


def write_trace(trace: Trace, path: Path, chosen: HeadSelection, lens: Lens | None) -> None:
    trace.save(path)


WRITERS = {".html": write_page, ".png": write_picture, ".safetensors": write_trace}


def lens_length(path: Path | None) -> int:
    """How many of the last tokens the lens is held over: each costs a product with the vocabulary at every depth."""
    return PAGE_LENS if path is not None and path.suffix.lower() == ".html" else 1


def in_range(trace: Trace, chosen: HeadSelection) -> HeadSelection:
    """Counted from 0, checked."""
    layer = None if chosen.layer is None else index("layer", chosen.layer, trace.num_layers)
    head = None if chosen.head is None else index("head", chosen.head, trace.num_heads(layer or 0))
    return HeadSelection(layer, head)


def print_heatmap(trace: Trace, chosen: HeadSelection, console: Console) -> None:
    found = shown(trace, chosen)
    console.print(f"{found.title}; query down, key across", highlight=False)
    drawn = heatmap(found.weights.mean(dim=0), found.view.rows, found.view.columns, console.width, has_colours(console))
    if found.view.columns != found.view.rows:
        keys = "  ".join(f"{number} {visible(text)}" for number, text in enumerate(found.view.columns))
        console.print(f"keys: {keys}", markup=False, highlight=False)
    console.print(drawn, soft_wrap=True)


def print_lens(lens: Lens, console: Console) -> None:
    """What each stage would say after the last token."""
    for stage, tokens, shares in zip(lens.stages, lens.tokens[:, -1], lens.probabilities[:, -1], strict=True):
        best = zip(tokens.tolist(), shares.tolist(), strict=True)
        words = "  ".join(f"{visible(lens.text_of(token), 14)} {share:.1%}" for token, share in best)
        console.print(f"{stage:<24} {words}", markup=False, highlight=False, soft_wrap=True)


def as_data(trace: Trace, chosen: HeadSelection, lens: Lens | None = None) -> dict[str, Any]:
    found = shown(trace, chosen)
    data: dict[str, Any] = {
        "tokens": trace.tokens,
        "queries": list(found.view.rows),
        "keys": list(found.view.columns),
        "attention": found.view.title,
        "layer": found.layer,
        "heads": list(range(len(found.weights))) if found.head is None else [found.head],
        "weights": found.weights.tolist(),
    }
    if lens is not None:
        data["lens"] = [
            {
                "after": stage,
                "tokens": [lens.text_of(token) for token in tokens.tolist()],
                "probabilities": shares.tolist(),
            }
            for stage, tokens, shares in zip(lens.stages, lens.tokens[:, -1], lens.probabilities[:, -1], strict=True)
        ]
    return data
