"""Export a trace: to a file, as a heatmap in the terminal, or as JSON data.

export_trace(traced, Path("page.html"), HeadSelection(layer=3))
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.files import check_output_path, write_text
from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.head_ranking import NO_SELECTION, HeadSelection
from clearhead.inspection.heatmap import has_colors, render_heatmap
from clearhead.inspection.lens_table import LensTable
from clearhead.inspection.page import render_page
from clearhead.inspection.png import save_png
from clearhead.inspection.recurrent import RecurrentTrace
from clearhead.inspection.token_labels import printable
from clearhead.inspection.trace import Trace
from clearhead.inspection.views import AttentionView

AnyTrace = Trace | RecurrentTrace
_PAGE_LENS_TOKENS = 128  # ten seconds for SmolLM2 on one core


@dataclass(frozen=True)
class _SelectedLayer:
    """The weights of one layer, of one head or of all."""

    view: AttentionView
    layer: int
    head: int | None
    weights: Tensor  # (N, T, S), or (1, T, S) of one head

    @property
    def title(self) -> str:
        """A heading that names the attention, the layer and the head."""
        num_heads = len(self.weights)
        every_head = "one head" if num_heads == 1 else f"mean of {num_heads} heads"  # a recurrent network has one
        heads = every_head if self.head is None else f"head {self.head}"
        return f"{self.view.title}, layer {self.layer}, {heads}"


def _select_layer(trace: AnyTrace, selection: HeadSelection) -> _SelectedLayer:
    """Return the selected layer, by default the last; of an encoder-decoder, that of the cross-attention."""
    views = trace.attention_views()
    view = views[0] if len(views) == 1 else views[1]
    num_layers = len(view.num_heads)
    layer = check_index("layer", num_layers - 1 if selection.layer is None else selection.layer, num_layers)
    head = None if selection.head is None else check_index("head", selection.head, view.num_heads[layer])
    return _SelectedLayer(view, layer, head, view.matrices(layer, head).weights.float())


# --- files


def export_trace(
    trace: AnyTrace, path: Path, selection: HeadSelection, lens: LensTable | None = None, model_name: str = ""
) -> None:
    """Write an .html page, a .png picture or a .safetensors file, depending on the extension of the path.

    model_name: shown in the page.
    """
    check_export_path(path, selection, lens is not None)
    _WRITERS[path.suffix.lower()](trace, path, selection, lens, model_name)


def check_export_path(path: Path, selection: HeadSelection, with_lens: bool) -> None:
    """Raise ClearheadError if the path cannot be written, or if its format cannot hold what was requested."""
    check_output_path(path, _WRITERS)
    extension = path.suffix.lower()
    if with_lens and extension != ".html":
        raise ClearheadError(f"a {extension} file cannot contain the lens; write an .html page or print it")
    if selection != NO_SELECTION and extension == ".safetensors":
        raise ClearheadError("a .safetensors file contains every layer and head; leave out layer and head")


def _write_page(trace: AnyTrace, path: Path, selection: HeadSelection, lens: LensTable | None, model_name: str) -> None:
    selection = _check_selection(trace, selection)
    subtitle = f"{model_name}: {trace.size}" if model_name else trace.size
    write_text(path, render_page(trace.attention_views(), trace.heading, subtitle, lens, selection))


def _write_picture(
    trace: AnyTrace, path: Path, selection: HeadSelection, lens: LensTable | None, model_name: str
) -> None:
    selected = _select_layer(trace, selection)
    matrices = {f"layer {selected.layer}, head {head}": matrix for head, matrix in enumerate(selected.weights)}
    if selected.head is not None:
        matrices = {selected.title: selected.weights[0]}
    save_png(path, matrices, selected.view.rows, selected.view.columns)


def _write_trace(
    trace: AnyTrace, path: Path, selection: HeadSelection, lens: LensTable | None, model_name: str
) -> None:
    if isinstance(trace, RecurrentTrace):
        raise ClearheadError("a recurrent network has no residual streams to save; write an .html page or a .png file")
    trace.save(path)


_WRITERS = {".html": _write_page, ".png": _write_picture, ".safetensors": _write_trace}


def num_lens_tokens(path: Path | None) -> int:
    """Return over how many of the last tokens to compute the lens.

    Each token costs a product with the vocabulary at every depth, and only a page displays more than one.
    """
    return _PAGE_LENS_TOKENS if path is not None and path.suffix.lower() == ".html" else 1


def _check_selection(trace: AnyTrace, selection: HeadSelection) -> HeadSelection:
    """Return the selection with indices from 0, after checking their range."""
    layer = None if selection.layer is None else check_index("layer", selection.layer, trace.num_layers)
    head = None if selection.head is None else check_index("head", selection.head, trace.num_heads(layer or 0))
    return HeadSelection(layer, head)


# --- terminal


def print_heatmap(trace: AnyTrace, selection: HeadSelection, console: Console) -> None:
    """Print the weights of a head, or the mean over the heads of a layer, as a heatmap."""
    selected = _select_layer(trace, selection)
    rows, columns = selected.view.rows, selected.view.columns
    console.print(f"{selected.title}; queries in rows, keys in columns", highlight=False)
    heatmap = render_heatmap(selected.weights.mean(dim=0), rows, columns, console.width, has_colors(console))
    if columns != rows:
        keys = "  ".join(f"{number} {printable(text)}" for number, text in enumerate(columns))
        console.print(f"keys: {keys}", markup=False, highlight=False)
    console.print(heatmap, soft_wrap=True)


def print_lens(lens: LensTable, console: Console) -> None:
    """Print what the model would predict after the last token at each depth."""
    for stage, tokens, probabilities in _last_token_predictions(lens):
        predictions = zip(tokens, probabilities, strict=True)
        texts = "  ".join(f"{printable(token, 14)} {probability:.1%}" for token, probability in predictions)
        console.print(f"{stage:<24} {texts}", markup=False, highlight=False, soft_wrap=True)


# --- data


def trace_data(trace: AnyTrace, selection: HeadSelection, lens: LensTable | None = None) -> dict[str, Any]:
    """Return the selected attention weights, and the lens if there is one, as JSON data."""
    selected = _select_layer(trace, selection)
    data: dict[str, Any] = {
        "tokens": trace.tokens,
        "queries": list(selected.view.rows),
        "keys": list(selected.view.columns),
        "attention": selected.view.title,
        "layer": selected.layer,
        "heads": list(range(len(selected.weights))) if selected.head is None else [selected.head],
        "weights": selected.weights.tolist(),
    }
    if lens is not None:
        data["lens"] = [
            {"after": stage, "tokens": tokens, "probabilities": probabilities}
            for stage, tokens, probabilities in _last_token_predictions(lens)
        ]
    return data


def _last_token_predictions(lens: LensTable) -> list[tuple[str, list[str], list[float]]]:
    """Return for each depth its name, and the most likely next tokens with their probabilities."""
    ids, probabilities = lens.tokens[:, -1].tolist(), lens.probabilities[:, -1].tolist()
    texts = [[lens.token_text(token) for token in row] for row in ids]
    return list(zip(lens.stages, texts, probabilities, strict=True))
