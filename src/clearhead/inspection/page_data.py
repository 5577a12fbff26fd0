"""The data of a page: the matrices of each view, rounded, as references to embedded arrays.

data = view_data(view, shares, full_heads={(0, 1)}, arrays=EmbeddedArrays())
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from clearhead.inspection.colors import weight_intensities
from clearhead.inspection.document import EmbeddedArrays
from clearhead.inspection.lens_table import LensTable
from clearhead.inspection.rounded_matrices import round_matrices
from clearhead.inspection.shares import AttentionShares
from clearhead.inspection.token_labels import printable
from clearhead.inspection.views import AttentionMatrices, AttentionView

THUMBNAIL_SIZE = 36  # maximum number of cells per side, one for each pixel it is displayed with
MAX_PROBABILITY = 65535  # the level of a probability of 1


def view_data(
    view: AttentionView,
    shares: Sequence[AttentionShares | None],
    full_heads: set[tuple[int, int]],
    arrays: EmbeddedArrays,
) -> dict[str, Any]:
    """Return the JSON data of one view, with the full matrices of `full_heads` and thumbnails of the others."""
    masks = _SharedMasks(arrays)
    layers = []
    for number, count in enumerate(view.num_heads):
        full = [head for head in range(count) if (number, head) in full_heads]
        matrices = view.matrices(number, None)
        layers.append({"number": number, "shares": _share_data(shares[number])})
        layers[-1] |= _matrix_data(matrices, full, arrays, masks)
    return {
        "title": view.title,
        "rows": [printable(text) for text in view.rows],
        "columns": [printable(text) for text in view.columns],
        "layers": layers,
    }


def _share_data(shares: AttentionShares | None) -> dict[str, list[float]] | None:
    """Return for each pattern the share of every head; three decimals are more than the page displays."""
    if shares is None:
        return None
    return {name: [round(share, 3) for share in values.tolist()] for name, values in shares.patterns.items()}


def _matrix_data(
    matrices: AttentionMatrices, full: list[int], arrays: EmbeddedArrays, masks: "_SharedMasks"
) -> dict[str, Any]:
    """Return references to the matrices of the heads `full`, and to the thumbnails of the other heads."""
    num_heads = len(matrices.weights)
    others = [head for head in range(num_heads) if head not in full]
    data: dict[str, Any] = {"num_heads": num_heads, "full": full}
    data["thumbnails"] = arrays.add(thumbnails(matrices.weights[others].float())) if others else None
    if full:
        rounded = round_matrices(matrices, full)
        data["weights"], data["maxima"] = arrays.add(rounded.weights), arrays.add(rounded.maxima)
        data["allowed"] = None if matrices.allowed is None else masks.add(matrices.allowed.cpu())
        if rounded.scores is not None and rounded.ranges is not None:
            data["scores"], data["ranges"] = arrays.add(rounded.scores), arrays.add(rounded.ranges)
    return data


def thumbnails(weights: Tensor) -> Tensor:
    """Max-pool weights (N, T, S) to at most 36 × 36 and return their intensities as bytes."""
    shape = min(weights.shape[1], THUMBNAIL_SIZE), min(weights.shape[2], THUMBNAIL_SIZE)
    pooled = adaptive_max_pool2d(weights, shape)
    return torch.stack([(weight_intensities(head) * 255).round().to(torch.uint8) for head in pooled])


@dataclass
class _SharedMasks:
    """Embed each distinct mask once; most layers have the same one."""

    arrays: EmbeddedArrays
    embedded: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)

    def add(self, allowed: Tensor) -> dict[str, Any]:
        """Return the reference to a mask, embedding it if it is new."""
        for mask, reference in self.embedded:
            if torch.equal(mask, allowed):
                return reference
        self.embedded.append((allowed, self.arrays.add(allowed.to(torch.uint8))))
        return self.embedded[-1][1]


def lens_data(lens: LensTable, arrays: EmbeddedArrays) -> dict[str, Any]:
    """Return the JSON data of the lens; each text is stored once, and `places` are indices into the texts."""
    token_ids, places = lens.tokens.unique(return_inverse=True)
    levels = (lens.probabilities.double().nan_to_num(0.0).clamp(0.0, 1.0) * MAX_PROBABILITY).round()
    return {
        "stages": lens.stages,
        "texts": [printable(lens.token_text(token)) for token in token_ids.tolist()],
        "places": arrays.add(places.to(torch.uint16 if len(token_ids) <= MAX_PROBABILITY + 1 else torch.int32)),
        "probabilities": arrays.add(levels.to(torch.uint16)),
    }
