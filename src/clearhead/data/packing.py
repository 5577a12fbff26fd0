"""Documents to rows of equal length, whole where they fit, with little left over.

    pack(np.array([5, 3, 3, 2, 1]), capacity=7)   # [[0, 3], [1, 2, 4]]: 5 + 2 and 3 + 3 + 1

Best fit, longest first (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"): each piece goes into the
row with the least room that still takes it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clearhead.data.counter_random import Ids


@dataclass(frozen=True)
class Pieces:
    """Parts of documents, each to be read in one go: places start .. start + length ask for the token after them."""

    starts: Ids
    lengths: Ids


def cut(document_starts: Ids, document_lengths: Ids, capacity: int) -> Pieces:
    """Documents in pieces of at most `capacity` places; a document of n tokens has n - 1, its last asks for nothing."""
    places = np.maximum(document_lengths - 1, 0)
    num_pieces = -(-places // capacity)
    document = np.repeat(np.arange(len(places)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    offsets = (np.arange(len(document)) - first_piece[document]) * capacity
    lengths = np.minimum(places[document] - offsets, capacity)
    return Pieces(document_starts[document] + offsets, lengths)


def pack(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of pieces by their number; each row's lengths sum to at most `capacity`."""
    assert len(lengths) == 0 or 0 < lengths.min() <= lengths.max() <= capacity
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r: some row has room r left
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(piece)
        rows_by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
