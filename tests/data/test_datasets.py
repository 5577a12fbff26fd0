"""Test the datasets: windows, chunks, packed documents and examples of unequal length."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from clearhead.architecture import (
    Embedding,
    FeedForward,
    GroupedAttention,
    Head,
    Layer,
    LayerNorm,
    ModelConfig,
    Rope,
    Stack,
)
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


def all_rows(dataset):
    return dataset.batch(np.arange(len(dataset)), keys(len(dataset)))


def test_windows_are_pieces_of_the_text_and_change_with_the_epoch():
    windows = Windows(Tokens.from_documents([range(100)]), 10, CausalReader())
    assert len(windows) == 9  # 99 targets, 10 in a row
    first, second = (windows.batch(np.arange(9), keys(9, epoch)) for epoch in (0, 1))
    for batch in (first, second):
        assert torch.equal(batch.tokens, batch.tokens[:, :1] + torch.arange(10))
        assert torch.equal(batch.targets, batch.tokens + 1)
    assert not torch.equal(first.tokens, second.tokens)


def test_windows_start_at_every_position_equally_often():
    windows = Windows(Tokens.from_documents([range(20)]), 10, CausalReader())
    starts = windows.batch(np.zeros(2000, int), keys(2000)).tokens[:, 0]
    counts = torch.bincount(starts)
    assert len(counts) == 10  # the last row ends with the last token
    assert (counts - 200).abs().max() < 70  # five standard deviations of 13


@settings(deadline=None)
@given(st.integers(12, 60), st.integers(1, 11))
def test_chunks_have_each_token_once_as_a_target(count, context):
    chunks = Chunks(Tokens.from_documents([range(count)]), context, CausalReader())
    targets = all_rows(chunks).targets.flatten().tolist()
    assert targets == list(range(1, 1 + (count - 1) // context * context))


def test_span_reader_makes_encoder_inputs_and_decoder_targets():
    reader = SpanReader(sentinels=tuple(range(200, 210)), start=0, end=1, share=0.15, mean_length=3.0)
    batch = all_rows(Chunks(Tokens.from_documents([range(2, 42)]), 20, reader))
    assert batch.source.shape == (
        2,
        20 - 3 + 1 + 1,
    )  # one sentinel in place of three tokens, and the end
    assert batch.tokens.tolist()[0][:2] == [0, 200]
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert (batch.targets[:, -1] == 1).all()


@settings(deadline=None)
@given(DOCUMENTS, st.integers(2, 8))
def test_packed_rows_contain_every_pair_of_tokens_and_restart_positions_in_each_document(documents, context):
    if all(len(document) < 2 for document in documents):
        with pytest.raises(ClearheadError, match="no document of at least two tokens"):
            Packed(Tokens.from_documents(documents), context)
        return
    batch = all_rows(Packed(Tokens.from_documents(documents), context))
    pairs = [pair for document in documents for pair in pairwise(document)]
    real = batch.targets != IGNORED
    assert sorted(zip(batch.tokens[real].tolist(), batch.targets[real].tolist(), strict=True)) == sorted(pairs)
    same = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert (batch.positions[:, 0] == 0).all()
    assert (batch.positions[:, 1:] == torch.where(same, batch.positions[:, :-1] + 1, 0)).all()
    assert (batch.tokens[:, 1:] == batch.targets[:, :-1])[same & real[:, :-1] & real[:, 1:]].all()


def test_a_packed_document_gives_the_same_logits_as_alone():
    """Pass the batch's documents and positions to the network and compare each document with its own forward."""
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
    batch = all_rows(Packed(Tokens.from_documents(documents), 11))
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
def test_examples_are_padded_like_pad_sequence(sizes):
    rows = [example(number, size) for number, size in enumerate(sizes)]
    batch = all_rows(Examples(rows, pad_id=0, context=9))
    for ours, theirs, filler in (
        (batch.tokens, [row.tokens for row in rows], 0),
        (batch.targets, [row.targets for row in rows], IGNORED),
        (batch.source, [row.source for row in rows], 0),
    ):
        expected = pad_sequence([torch.tensor(row) for row in theirs], batch_first=True, padding_value=filler)
        assert torch.equal(ours, expected)
    for mask, ids in ((batch.mask, batch.tokens), (batch.source_mask, batch.source)):
        assert torch.equal(ids != 0, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)


def test_examples_without_a_source_have_no_source_tensor():
    batch = all_rows(Examples([Example([1, 2], [2, 3])], pad_id=0, context=5))
    assert batch.source is None
    assert batch.mask is None


def test_examples_longer_than_the_context_are_dropped_and_counted():
    examples = Examples([example(0, (3, 2)), example(1, (2, 6)), example(2, (6, 2))], pad_id=0, context=5)
    assert (len(examples), examples.num_too_long) == (1, 2)
    with pytest.raises(ClearheadError, match=r"none of the 1 examples fits data\.context 5; the shortest has 6 tokens"):
        Examples([example(0, (6, 1))], pad_id=0, context=5)


@pytest.mark.parametrize("rows", [Windows, Chunks])
def test_a_text_shorter_than_a_row_is_rejected(rows):
    with pytest.raises(ClearheadError, match="the text has 10 tokens, but a row of context 10 needs 11"):
        rows(Tokens.from_documents([range(10)]), 10, CausalReader())
