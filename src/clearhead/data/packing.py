"""Pack documents into rows of equal length. Documents that fit stay in one piece, and little space is wasted.

    pack(np.array([5, 3, 3, 2, 1]), capacity=7)   # [[0, 3], [1, 2, 4]]: 5 + 2 and 3 + 3 + 1

The algorithm is best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"): from the longest
to the shortest, each piece goes into the row with the least free space that still holds it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clearhead.data.counter_random import Ids


@dataclass(frozen=True)
class Pieces:
    """Parts of documents. A piece has `length` input tokens from `start`; its targets are one token later."""

    starts: Ids
    lengths: Ids


def cut_documents(document_starts: Ids, document_lengths: Ids, capacity: int) -> Pieces:
    """Cut documents into pieces of at most `capacity` inputs.

    A document of n tokens has n - 1 inputs, because nothing follows its last token.
    """
    num_inputs = np.maximum(document_lengths - 1, 0)
    num_pieces = -(-num_inputs // capacity)
    document = np.repeat(np.arange(len(num_inputs)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    offsets = (np.arange(len(document)) - first_piece[document]) * capacity
    lengths = np.minimum(num_inputs[document] - offsets, capacity)
    return Pieces(document_starts[document] + offsets, lengths)


def pack(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return rows of piece indices. The lengths in each row sum to at most `capacity`."""
    assert len(lengths) == 0 or 0 < lengths.min() <= lengths.max() <= capacity
    rows: list[list[int]] = []
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by their free space
    available = 0  # bit s is set if some row has s tokens of free space
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        large_enough = available >> length
        if large_enough:
            space = length + (large_enough & -large_enough).bit_length() - 1  # the lowest set bit
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                available &= ~(1 << space)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(piece)
        rows_by_space[space - length].append(row)
        available |= 1 << (space - length)
    return rows
