"""Test packing: every piece occurs once, rows do not overflow, and little space is wasted."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.packing import cut_documents, pack

LENGTHS = st.lists(st.integers(1, 30), max_size=60)


def test_pack_gives_the_example_of_the_docstring():
    assert pack(np.array([5, 3, 3, 2, 1]), capacity=7) == [[0, 3], [1, 2, 4]]


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 40))
def test_every_piece_is_in_exactly_one_row_and_rows_do_not_overflow(lengths, capacity):
    rows = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert all(sum(lengths[piece] for piece in row) <= capacity for row in rows)


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 40))
def test_no_two_rows_could_be_merged_into_one(lengths, capacity):
    totals = sorted(sum(lengths[piece] for piece in row) for row in pack(np.array(lengths, dtype=np.int64), capacity))
    assert len(totals) < 2 or totals[0] + totals[1] > capacity


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 40))
def test_each_piece_goes_into_the_row_with_the_least_free_space_that_fits(lengths, capacity):
    """Compare with a best fit that looks at every row."""
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    rows = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(capacity - sum(lengths[piece] for piece in row) for row in rows) == sorted(spaces)


def test_best_fit_wastes_less_than_one_percent():
    lengths = np.random.default_rng(0).integers(1, 512, 5000)
    rows = pack(lengths, 512)
    assert lengths.sum() / (len(rows) * 512) > 0.99  # hardly more rows than pieces of over half a row


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 8))
def test_pieces_have_every_token_except_the_first_of_a_document_once_as_a_target(lengths, capacity):
    lengths = np.array(lengths)
    starts = np.cumsum(lengths) - lengths
    pieces = cut_documents(starts, lengths, capacity)
    targets = [
        index + 1
        for start, length in zip(pieces.starts, pieces.lengths, strict=True)
        for index in range(start, start + length)
    ]
    assert sorted(targets) == [
        start + offset for start, length in zip(starts, lengths, strict=True) for offset in range(1, length)
    ]
    assert (pieces.lengths <= capacity).all()
    assert (pieces.lengths >= 1).all()
