"""Masks against the drawing in the docstring of the module; padding, documents and positions."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from clearhead.architecture import AttentionPattern, Bidirectional, Causal, Chunked, SlidingWindow
from clearhead.errors import ClearheadError
from clearhead.model import masks
from clearhead.model.masks import AttentionIndices, Mask, cross_attention_mask, make_mask, positions_from_mask

DRAWN_PATTERNS = {"Causal": Causal(), "SlidingWindow(2)": SlidingWindow(size=2), "Chunked(2)": Chunked(size=2)}
PADDED = "Causal, 2 padding tokens on the left"


def drawing() -> dict[str, Tensor]:
    """Return the masks drawn in the docstring, by their titles."""
    lines = masks.__doc__.splitlines()
    first = next(number for number, line in enumerate(lines) if line.strip().startswith("Causal "))
    titles = re.split(r"\s{2,}", lines[first].strip())
    columns: list[list[list[bool]]] = [[] for _ in titles]
    for line in lines[first + 1 : first + 6]:
        for column, row in zip(columns, re.split(r"\s{2,}", line.strip()), strict=True):
            column.append([mark == "1" for mark in row.split()])
    return dict(zip(titles, map(torch.tensor, columns), strict=True))


def allowed(
    pattern: AttentionPattern, real: Tensor | None = None, documents: Tensor | None = None, length: int = 5
) -> Tensor:
    """Return the mask of a pattern as a tensor (B, T, S)."""
    tokens = torch.zeros(1 if real is None else len(real), length)
    index = torch.arange(length)[None]
    mask = make_mask(
        pattern,
        AttentionIndices.from_slots(tokens, real)
        if documents is None
        else AttentionIndices.from_positions(index, real, documents),
    )
    if mask.causal:
        assert mask.allowed is None
        return torch.ones(1, length, length, dtype=torch.bool).tril()
    if mask.allowed is None:
        return torch.ones(1, length, length, dtype=torch.bool)
    return mask.allowed[:, 0]


def test_the_drawing_is_complete():
    assert drawing().keys() == {*DRAWN_PATTERNS, PADDED}
    assert all(picture.shape == (5, 5) for picture in drawing().values())


@pytest.mark.parametrize("name", DRAWN_PATTERNS)
def test_make_mask_returns_the_drawn_masks(name):
    assert torch.equal(allowed(DRAWN_PATTERNS[name])[0], drawing()[name])


def test_make_mask_returns_the_drawn_padding():
    """A padding query attends to no token either: its row is empty."""
    real = torch.tensor([[0, 0, 1, 1, 1]])
    assert torch.equal(allowed(Causal(), real)[0], drawing()[PADDED])


def test_causal_and_bidirectional_masks_without_padding_need_no_tensor():
    indices = AttentionIndices.from_slots(torch.zeros(2, 5))
    assert make_mask(Bidirectional(), indices) == Mask()
    assert make_mask(Causal(), indices) == Mask(causal=True)


def test_a_mask_cannot_be_causal_and_have_a_tensor():
    with pytest.raises(ClearheadError, match="a Mask takes either causal or allowed, not both"):
        Mask(torch.ones(1, 1, 2, 2, dtype=torch.bool), causal=True)


def test_a_causal_mask_for_fewer_queries_than_keys_is_a_tensor():
    """The queries are the last two of five tokens. The kernel's own causal mask would align them to the first key."""
    indices = AttentionIndices(torch.tensor([[3, 4]]), torch.arange(5)[None])
    mask = make_mask(Causal(), indices)
    assert not mask.causal
    assert mask.allowed[0, 0].tolist() == [[True] * 4 + [False], [True] * 5]


def test_bidirectional_and_cross_attention_allow_all_real_keys():
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert torch.equal(allowed(Bidirectional(), real), real.bool()[:, None].expand(2, 5, 5))
    assert cross_attention_mask(None) == Mask()
    assert torch.equal(cross_attention_mask(real).allowed, real.bool()[:, None, None])


def test_tokens_attend_within_their_document_only():
    documents = torch.tensor([[7, 7, 3, 3, 3]])
    expected = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()
    assert torch.equal(allowed(Bidirectional(), documents=documents)[0], expected)
    assert torch.equal(allowed(Causal(), documents=documents)[0], expected.tril())


def test_chunks_are_counted_from_the_first_real_token():
    real = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = allowed(Chunked(size=2), real)
    assert torch.equal(found[0, 1:, 1:], allowed(Chunked(size=2), length=4)[0])
    assert torch.equal(found[1], allowed(Chunked(size=2))[0])


@given(length=st.integers(1, 9), size=st.integers(1, 12))
def test_every_causal_pattern_allows_the_token_itself_and_nothing_later(length, size):
    for pattern in (Causal(), SlidingWindow(size=size), Chunked(size=size)):
        found = allowed(pattern, length=length)[0]
        assert found.diagonal().all()
        assert not found.triu(diagonal=1).any()
    counts = allowed(SlidingWindow(size=size), length=length)[0].sum(dim=1)
    assert counts.tolist() == [min(size, query + 1) for query in range(length)]
    counts = allowed(Chunked(size=size), length=length)[0].sum(dim=1)
    assert counts.tolist() == [query % size + 1 for query in range(length)]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3))
def test_positions_count_the_real_tokens_of_each_sequence(rows):
    real = torch.tensor(rows)
    positions = positions_from_mask(torch.zeros_like(real), real)
    assert positions.shape == real.shape
    for row, found in zip(rows, positions.tolist(), strict=True):
        real_positions = [position for position, is_real in zip(found, row, strict=True) if is_real]
        assert real_positions == list(range(len(real_positions)))
        assert min(found) >= 0


def test_positions_without_a_mask_are_shared_by_the_batch():
    assert positions_from_mask(torch.zeros(3, 4), None).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_an_attention_mask_may_have_any_dtype(dtype):
    real = torch.tensor([[0, 0, 1, 3, 1]]).to(dtype)
    assert torch.equal(allowed(Causal(), real)[0], drawing()[PADDED])
    assert positions_from_mask(torch.zeros(1, 5), real).tolist() == [[0, 0, 0, 1, 2]]
