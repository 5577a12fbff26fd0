"""Documents in rows: nothing lost, nothing twice, little left over."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.data.packing import cut, pack

LENGTHS = st.lists(st.integers(1, 30), max_size=60)


def test_the_example_of_the_docstring():
    assert pack(np.array([5, 3, 3, 2, 1]), capacity=7) == [[0, 3], [1, 2, 4]]


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 40))
def test_every_piece_is_in_one_row_and_fits(lengths, capacity):
    rows = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(piece for row in rows for piece in row) == list(range(len(lengths)))
    assert all(sum(lengths[piece] for piece in row) <= capacity for row in rows)


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 40))
def test_no_two_rows_would_fit_into_one(lengths, capacity):
    fillings = sorted(sum(lengths[piece] for piece in row) for row in pack(np.array(lengths, dtype=np.int64), capacity))
    assert len(fillings) < 2 or fillings[0] + fillings[1] > capacity


@settings(deadline=None)
@given(LENGTHS, st.integers(30, 40))
def test_each_piece_goes_where_the_least_room_is(lengths, capacity):
    """By looking at every row."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    rows = pack(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(capacity - sum(lengths[piece] for piece in row) for row in rows) == sorted(rooms)


def test_best_fit_leaves_little_over():
    lengths = np.random.default_rng(0).integers(1, 512, 5000)
    rows = pack(lengths, 512)
    assert lengths.sum() / (len(rows) * 512) > 0.99  # a row for each of those above half, and hardly any more


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.integers(1, 8))
def test_pieces_ask_for_every_token_but_the_first_once(lengths, capacity):
    lengths = np.array(lengths)
    starts = np.cumsum(lengths) - lengths
    pieces = cut(starts, lengths, capacity)
    asked = [
        place + 1
        for start, length in zip(pieces.starts, pieces.lengths, strict=True)
        for place in range(start, start + length)
    ]
    assert sorted(asked) == [
        start + place for start, length in zip(starts, lengths, strict=True) for place in range(1, length)
    ]
    assert (pieces.lengths <= capacity).all()
    assert (pieces.lengths >= 1).all()
