"""Save a matrix, or all heads of a layer, as a PNG with matplotlib (pip install "clearhead[plot]").

save_png("map.png", {"layer 3, head 0": weights}, rows=["I", "am"], columns=["I", "am"])
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.colors import LIGHT, to_hex, weight_intensities
from clearhead.inspection.token_labels import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIDE = 7.0  # inches of a single matrix; it grows with the number of labels
_SMALL_SIDE = 3.0  # inches of each of several matrices, which have no labels
_LABEL_SPACING = 0.145  # inches between two labels
_MAX_SIDE = 20.0  # inches: 3,000 pixels


def save_png(path: str | Path, matrices: Mapping[str, Tensor], rows: Sequence[str], columns: Sequence[str]) -> Path:
    """Draw each matrix (T, S) under its title; the color follows the square root of the weight. Return the path."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ClearheadError('a PNG needs matplotlib; run: pip install "clearhead[plot]"') from None
    assert matrices
    num_columns = math.ceil(math.sqrt(len(matrices)))
    num_rows = math.ceil(len(matrices) / num_columns)
    longest = max(len(rows), len(columns))
    side = min(max(_SIDE, 1.5 + longest * _LABEL_SPACING), _MAX_SIDE) if len(matrices) == 1 else _SMALL_SIDE
    figure = Figure(figsize=(side * num_columns, side * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axis, (title, matrix) in zip(axes, matrices.items(), strict=False):
        draw_matrix(axis, title, matrix, rows, columns, labeled=len(matrices) == 1)
    for axis in axes[len(matrices) :]:
        axis.axis("off")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # no font has every script
        figure.savefig(path, format="png", dpi=150)
    return Path(path)


def draw_matrix(
    axes: "Axes", title: str, matrix: Tensor, rows: Sequence[str], columns: Sequence[str], labeled: bool
) -> None:
    """Draw one matrix, with a label for every token, or for every second, third, ... if there is no space for all."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("clearhead", [to_hex(color) for color in LIGHT])
    axes.imshow(weight_intensities(matrix).cpu().numpy(), cmap=ramp, vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_title(title, fontsize=10, parse_math=False)
    if not labeled:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    interval = math.ceil(max(len(rows), len(columns)) * _LABEL_SPACING / _MAX_SIDE)
    for axis, texts, rotation in ((axes.yaxis, rows, 0), (axes.xaxis, columns, 90)):
        labels = [printable(text, 16) for text in texts[::interval]]
        axis.set_ticks(range(0, len(texts), interval), labels, fontsize=8, rotation=rotation, parse_math=False)
