"""Rows to batches: windows, chunks, packed documents and examples of unequal length."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from clearhead.architecture.branches import FeedForward
from clearhead.architecture.config import Embedding, GroupedAttention, Head, Layer, ModelConfig, Stack
from clearhead.architecture.parts import LayerNorm, Rope
from clearhead.data.batch import IGNORED
from clearhead.data.counter_random import row_keys
from clearhead.data.datasets import Chunks, Example, Examples, Packed, Windows
from clearhead.data.readers import CausalReader, SpanReader
from clearhead.data.tokens import Tokens
from clearhead.errors import ClearheadError
from clearhead.model.transformer import Transformer

DOCUMENTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=12)


def keys(count, epoch=0):
    return row_keys(0, epoch, np.arange(count))


def whole(dataset):
    return dataset.batch(np.arange(len(dataset)), keys(len(dataset)))


def test_windows_are_pieces_of_the_text_and_move_by_epoch():
    windows = Windows(Tokens.of([range(100)]), 10, CausalReader())
    assert len(windows) == 9  # 99 tokens are asked for, 10 in a row
    first, second = (windows.batch(np.arange(9), keys(9, epoch)) for epoch in (0, 1))
    for batch in (first, second):
        assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(10))
        assert torch.equal(batch.targets, batch.tokens + 1)
    assert not torch.equal(first.tokens, second.tokens)


def test_windows_start_anywhere():
    windows = Windows(Tokens.of([range(20)]), 10, CausalReader())
    starts = windows.batch(np.zeros(2000, int), keys(2000)).tokens[:, 0]
    counts = torch.bincount(starts)
    assert len(counts) == 10  # the last row ends with the last token
    assert (counts - 200).abs().max() < 70  # five deviations of 13


@settings(deadline=None)
@given(st.integers(12, 60), st.integers(1, 11))
def test_chunks_ask_for_each_token_once(count, context):
    chunks = Chunks(Tokens.of([range(count)]), context, CausalReader())
    asked = whole(chunks).targets.flatten().tolist()
    assert asked == list(range(1, 1 + (count - 1) // context * context))


def test_span_rows_are_for_an_encoder_decoder():
    reader = SpanReader(sentinels=tuple(range(200, 210)), start=0, end=1, share=0.15, mean_length=3.0)
    batch = whole(Chunks(Tokens.of([range(2, 42)]), 20, reader))
    assert batch.source.shape == (2, 20 - 3 + 1 + 1)  # one span of three for a sentinel, and the end
    assert batch.tokens.tolist()[0][:2] == [0, 200]
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert (batch.targets[:, -1] == 1).all()


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 8))
def test_packed_rows_hold_each_document_for_itself(documents, context):
    if all(len(document) < 2 for document in documents):
        with pytest.raises(ClearheadError, match="no document of two tokens"):
            Packed(Tokens.of(documents), context)
        return
    batch = whole(Packed(Tokens.of(documents), context))
    pairs = [pair for document in documents for pair in pairwise(document)]
    real = batch.targets != IGNORED
    assert sorted(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True)) == sorted(pairs)
    same = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert (batch.positions[:, 0] == 0).all()
    assert (batch.positions[:, 1:] == torch.where(same, batch.positions[:, :-1] + 1, 0)).all()
    assert (batch.tokens[:, 1:] == batch.targets[:, :-1])[same & real[:, :-1] & real[:, 1:]].all()


def test_a_packed_document_is_read_as_if_it_were_alone():
    """The network's own documents and positions: losses of a row are those of its documents."""
    torch.manual_seed(0)
    attention = GroupedAttention(num_heads=2, num_kv_heads=2, head_width=8, position=Rope(theta=10_000.0))
    layer = Layer(
        attention=attention,
        feed_forward=FeedForward(width=32, activation="gelu"),
        norm=LayerNorm(epsilon=1e-5),
    )
    decoder = Stack(embedding=Embedding(vocab_size=50), layers=(layer,) * 2)
    network = Transformer(ModelConfig(width=16, context=16, decoder=decoder, head=Head())).eval()
    documents = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13, 14]]
    batch = whole(Packed(Tokens.of(documents), 11))
    assert batch.tokens.shape == (1, 11)
    with torch.no_grad():
        together = network(batch.tokens, None, batch.positions, documents=batch.documents)[0]
        for number, document in enumerate([documents[2], documents[0], documents[1]]):
            alone = network(torch.tensor([document[:-1]]))[0]
            torch.testing.assert_close(together[batch.documents[0] == number], alone, rtol=1e-5, atol=1e-6)


# --- examples

ROWS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def example(number, sizes):
    tokens, source = (list(range(number + 1, number + 1 + size)) for size in sizes)
    return Example(tokens, [token + 1 for token in tokens], source)


@settings(deadline=None)
@given(ROWS)
def test_examples_are_padded_as_torch_pads(sizes):
    rows = [example(number, size) for number, size in enumerate(sizes)]
    batch = whole(Examples(rows, pad_id=0, context=9))
    for ours, theirs, filler in (
        (batch.tokens, [row.tokens for row in rows], 0),
        (batch.targets, [row.targets for row in rows], IGNORED),
        (batch.source, [row.source for row in rows], 0),
    ):
        expected = pad_sequence([torch.tensor(row) for row in theirs], batch_first=True, padding_value=filler)
        assert torch.equal(ours, expected)
    for mask, ids in ((batch.mask, batch.tokens), (batch.source_mask, batch.source)):
        assert torch.equal(ids != 0, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)


def test_examples_without_a_source():
    batch = whole(Examples([Example([1, 2], [2, 3])], pad_id=0, context=5))
    assert batch.source is None
    assert batch.mask is None


def test_long_examples_are_left_out_and_counted():
    examples = Examples([example(0, (3, 2)), example(1, (2, 6)), example(2, (6, 2))], pad_id=0, context=5)
    assert (len(examples), examples.num_left_out) == (1, 2)
    with pytest.raises(ClearheadError, match="none of the 1 examples fits the context of 5 tokens; the shortest has 6"):
        Examples([example(0, (6, 1))], pad_id=0, context=5)


@pytest.mark.parametrize("rows", [Windows, Chunks])
def test_a_text_shorter_than_a_row(rows):
    with pytest.raises(ClearheadError, match="the text has 10 tokens; a row of context 10 takes 11"):
        rows(Tokens.of([range(10)]), 10, CausalReader())
