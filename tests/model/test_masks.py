"""Who may look at whom: the drawing in the module's docstring, padding, documents and positions."""

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

DRAWN = {"Causal": Causal(), "SlidingWindow(2)": SlidingWindow(size=2), "Chunked(2)": Chunked(size=2)}


def drawing() -> dict[str, Tensor]:
    """The pictures of the docstring, side by side under their titles."""
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
    """(B, T, S), spelled out."""
    tokens = torch.zeros(1 if real is None else len(real), length)
    index = torch.arange(length)[None]
    mask = make_mask(
        pattern, AttentionIndices.of(tokens, real) if documents is None else AttentionIndices.at(index, real, documents)
    )
    if mask.causal:
        assert mask.allowed is None
        return torch.ones(1, length, length, dtype=torch.bool).tril()
    if mask.allowed is None:
        return torch.ones(1, length, length, dtype=torch.bool)
    return mask.allowed[:, 0]


def test_the_drawing_is_whole():
    assert drawing().keys() == {*DRAWN, "padded left by 2 (causal)"}
    assert all(picture.shape == (5, 5) for picture in drawing().values())


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_masks_are_what_the_code_makes(name):
    assert torch.equal(allowed(DRAWN[name])[0], drawing()[name])


def test_drawn_padding_is_what_the_code_makes():
    """A query of padding sees no real token either: its row is empty."""
    real = torch.tensor([[0, 0, 1, 1, 1]])
    assert torch.equal(allowed(Causal(), real)[0], drawing()["padded left by 2 (causal)"])


def test_plain_masks_are_told_to_the_kernel_without_a_tensor():
    grid = AttentionIndices.of(torch.zeros(2, 5))
    assert make_mask(Bidirectional(), grid) == Mask()
    assert make_mask(Causal(), grid) == Mask(causal=True)


def test_a_mask_is_causal_or_spelled_out():
    with pytest.raises(ClearheadError, match="causal or spelled out, not both"):
        Mask(torch.ones(1, 1, 2, 2, dtype=torch.bool), causal=True)


def test_causal_with_fewer_queries_than_keys_is_spelled_out():
    """The last two queries of five: the kernel's own causal mask would count from the first key."""
    grid = AttentionIndices(torch.tensor([[3, 4]]), torch.arange(5)[None])
    mask = make_mask(Causal(), grid)
    assert not mask.causal
    assert mask.allowed[0, 0].tolist() == [[True] * 4 + [False], [True] * 5]


def test_everything_sees_all_real_keys():
    real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert torch.equal(allowed(Bidirectional(), real), real.bool()[:, None].expand(2, 5, 5))
    assert cross_attention_mask(None) == Mask()
    assert torch.equal(cross_attention_mask(real).allowed, real.bool()[:, None, None])


def test_documents_see_themselves_only():
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
def test_every_reach_sees_itself_and_nothing_later(length, size):
    for pattern in (Causal(), SlidingWindow(size=size), Chunked(size=size)):
        found = allowed(pattern, length=length)[0]
        assert found.diagonal().all()
        assert not found.triu(diagonal=1).any()
    counts = allowed(SlidingWindow(size=size), length=length)[0].sum(dim=1)
    assert counts.tolist() == [min(size, query + 1) for query in range(length)]
    counts = allowed(Chunked(size=size), length=length)[0].sum(dim=1)
    assert counts.tolist() == [query % size + 1 for query in range(length)]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3))
def test_positions_count_the_real_tokens_of_each_row(rows):
    real = torch.tensor(rows)
    positions = positions_from_mask(torch.zeros_like(real), real)
    assert positions.shape == real.shape
    for row, found in zip(rows, positions.tolist(), strict=True):
        of_real = [position for position, is_real in zip(found, row, strict=True) if is_real]
        assert of_real == list(range(len(of_real)))
        assert min(found) >= 0


def test_positions_without_a_mask_are_one_row_for_all():
    assert positions_from_mask(torch.zeros(3, 4), None).tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32], ids=str)
def test_a_mask_may_be_of_any_kind_of_number(kind):
    real = torch.tensor([[0, 0, 1, 3, 1]]).to(kind)
    assert torch.equal(allowed(Causal(), real)[0], drawing()["padded left by 2 (causal)"])
    assert positions_from_mask(torch.zeros(1, 5), real).tolist() == [[0, 0, 0, 1, 2]]
