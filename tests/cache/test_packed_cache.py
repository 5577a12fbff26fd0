"""The packed cache against the uncached forward pass: prompts and running sequences of every family in one row."""

import pytest
import torch

from clearhead.cache import PackedCache, PackedLayout, PagePool, PageStorage, forward_hidden
from clearhead.families import preset, presets
from tests.model.toys import POSITIONS, VOCAB, decoder, toy
from tests.toy_presets import shrink

ARCHITECTURES = {shrink(preset(name)): name for name in presets()}  # at toy size, many presets are the same network
DECODERS = {name: config for config, name in ARCHITECTURES.items() if config.decoder and not config.encoder}
DECODERS |= {f"toy with {name}": decoder(position=position) for name, position in POSITIONS.items()}
PAGE_SIZE = 4


def random_tokens(count, seed=0):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def packed_layout(tables, counts):
    """Return the layout of the last `counts` tokens of each page table."""
    starts = [table.num_tokens - count for table, count in zip(tables, counts, strict=True)]
    pairs = list(zip(tables, starts, strict=True))
    longest = max(len(table.pages) for table in tables)
    return PackedLayout(
        positions=torch.tensor([token for table, start in pairs for token in range(start, table.num_tokens)]),
        slots=torch.tensor([slot for table, start in pairs for slot in table.slots(start, table.num_tokens)]),
        sequence_starts=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        lengths=torch.tensor([table.num_tokens for table in tables], dtype=torch.int32),
        page_tables=torch.tensor(
            [table.pages + [0] * (longest - len(table.pages)) for table in tables], dtype=torch.int32
        ),
    )


@torch.no_grad()
def step(network, storage, tables, rows, absorb=False):
    """Run the new tokens of each sequence, packed, and return the logits of each sequence's own tokens."""
    for table, row in zip(tables, rows, strict=True):
        assert table.append(row) is None
    cache = PackedCache(storage, packed_layout(tables, [len(row) for row in rows]))
    tokens = torch.tensor([[token for row in rows for token in row]])
    logits = network.compute_logits(forward_hidden(network, tokens, cache, absorb=absorb))
    return logits[0].split([len(row) for row in rows])


@torch.no_grad()
def uncached(network, tokens):
    """Return the logits of one sequence, computed without a cache."""
    return network(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("absorb", [False, True])
def test_packed_tokens_equal_uncached(name, absorb):
    config = DECODERS[name]
    network = toy(config)
    storage = PageStorage.for_stack(
        config.decoder, PagePool(num_pages=30, page_size=PAGE_SIZE), torch.float64, torch.device("cpu")
    )
    texts = [random_tokens(12, 1), random_tokens(7, 2), random_tokens(10, 3)]
    tables = [storage.pool.create_table(text) for text in texts]
    found = [[], [], []]
    for starts, stops in (((0, 0, 0), (5, 1, 4)), ((5, 1, 4), (6, 2, 5)), ((6, 2, 5), (12, 3, 10))):
        rows = [text[a:b] for text, a, b in zip(texts, starts, stops, strict=True)]
        for logits, piece in zip(found, step(network, storage, tables, rows, absorb), strict=True):
            logits.append(piece)
    for text, pieces in zip(texts, found, strict=True):
        logits = torch.cat(pieces)
        assert (logits - uncached(network, text)[: len(logits)]).abs().max() <= 1e-12


def test_the_layout_of_the_documentation():
    pool = PagePool(num_pages=9, page_size=4)
    first, second = pool.create_table([]), pool.create_table([])
    first.pages, first.tokens = [3, 0], random_tokens(5)
    second.pages, second.tokens = [8, 5], random_tokens(7)
    layout = packed_layout([first, second], [5, 1])
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 6]
    assert layout.slots.tolist() == [12, 13, 14, 15, 0, 22]
    assert layout.documents.tolist() == [0, 0, 0, 0, 0, 1]
    slots, positions, documents = layout.key_slots(4)
    assert slots.tolist() == [12, 13, 14, 15, 0, 32, 33, 34, 35, 20, 21, 22]
    assert positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
    assert documents.tolist() == [0] * 5 + [1] * 7


def test_tokens_that_do_not_match_the_layout_are_an_error():
    network, storage = toy(decoder()), PageStorage(PagePool(4, PAGE_SIZE))
    table = storage.pool.create_table([])
    table.append([1, 2])
    with pytest.raises(AssertionError, match="do not match"):
        network(torch.tensor([[1, 2, 3]]), cache=PackedCache(storage, packed_layout([table], [2])))
