"""A matrix, or all heads of a layer, as a PNG by matplotlib (pip install "clearhead[plot]").

save_png("map.png", {"layer 3, head 0": weights}, rows=["I", "am"], columns=["I", "am"])
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.colours import LIGHT, hexadecimal, weight_shares
from clearhead.inspection.labels import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 48


def save_png(path: str | Path, matrices: Mapping[str, Tensor], rows: Sequence[str], columns: Sequence[str]) -> Path:
    """Each matrix (T, S) under its title; darker is larger, by the root for weights."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ClearheadError('a PNG needs matplotlib: pip install "clearhead[plot]"') from None
    assert matrices
    across = math.ceil(math.sqrt(len(matrices)))
    down = math.ceil(len(matrices) / across)
    side = 7.0 if len(matrices) == 1 else 3.0  # inches
    figure = Figure(figsize=(side * across, side * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for place, (title, matrix) in zip(axes, matrices.items(), strict=False):
        draw(place, title, matrix, rows, columns, labelled=len(matrices) == 1)
    for place in axes[len(matrices) :]:
        place.axis("off")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # no font has every script
        figure.savefig(path, format="png", dpi=150)
    return Path(path)


def draw(axes: "Axes", title: str, matrix: Tensor, rows: Sequence[str], columns: Sequence[str], labelled: bool) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("clearhead", [hexadecimal(colour) for colour in LIGHT])
    axes.imshow(weight_shares(matrix).cpu().numpy(), cmap=ramp, vmin=0.0, vmax=1.0, interpolation="nearest")
    axes.set_title(title, fontsize=10, parse_math=False)
    if not labelled:
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    if len(rows) <= MOST_LABELS and len(columns) <= MOST_LABELS:
        axes.set_yticks(range(len(rows)), [visible(text, 16) for text in rows], fontsize=8, parse_math=False)
        axes.set_xticks(
            range(len(columns)), [visible(text, 16) for text in columns], fontsize=8, rotation=90, parse_math=False
        )
