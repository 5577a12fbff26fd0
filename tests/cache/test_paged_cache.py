"""The paged cache against the uncached forward: ragged rows, shared beginnings, copies on write."""

import pytest
import torch

from clearhead.cache.page_pool import OutOfPagesError, PagePool
from clearhead.cache.paged_cache import PagedCache, PageStorage
from clearhead.families import preset
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, decoder, toy

NAMES = ("gpt2", "llama-3.1-8b", "mistral-7b", "gemma-3-1b", "deepseek-v3", "llama-4-scout", "bloom-560m")


def memory(num_pages=40, page_size=4):
    return PageStorage(PagePool(num_pages, page_size))


def tokens_of(count, seed=0):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def step(network, cache, rows):
    """Run these new tokens of each row, left-padded; the logits of each row's own."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    logits = network(tokens, mask, cache=cache)
    cache.advance()
    return [logits[number, longest - len(row) :] for number, row in enumerate(rows)]


@torch.no_grad()
def whole(network, tokens):
    return network(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_equal_the_uncached_forward(name):
    network = toy(shrink(preset(name)))
    texts = [tokens_of(20, 1), tokens_of(11, 2), tokens_of(15, 3)]
    cache = PagedCache(room := memory(), [room.pool.create_table(text) for text in texts])
    found = [[], [], []]
    for starts, stops in (((0, 0, 0), (9, 2, 5)), ((9, 2, 5), (10, 3, 6)), ((10, 3, 6), (20, 11, 15))):
        pieces = step(network, cache, [text[a:b] for text, a, b in zip(texts, starts, stops, strict=True)])
        for kept, piece in zip(found, pieces, strict=True):
            kept.append(piece)
    for text, pieces in zip(texts, found, strict=True):
        assert (torch.cat(pieces) - whole(network, text)).abs().max() <= 1e-12


def test_a_later_prompt_reuses_a_published_beginning():
    network, room = toy(decoder()), memory()
    text = tokens_of(18)
    step(network, PagedCache(room, [room.pool.create_table(text)]), [text])
    other = text[:13] + tokens_of(5, 9)
    table = room.pool.create_table(other)
    assert table.num_tokens == 12  # three full pages of four
    found = step(network, PagedCache(room, [table]), [other[12:]])[0]
    assert (found - whole(network, other)[12:]).abs().max() <= 1e-12


def test_forks_share_until_they_write():
    network, room = toy(decoder()), memory()
    text = tokens_of(10)
    first = room.pool.create_table(text)
    step(network, PagedCache(room, [first]), [text])
    used = room.pool.num_used
    second = first.fork()
    assert room.pool.num_used == used
    found = step(network, PagedCache(room, [first, second]), [[1, 2], [3, 4]])
    assert room.pool.num_used == used + 1  # only the page both wrote into
    assert (found[0] - whole(network, [*text, 1, 2])[10:]).abs().max() <= 1e-12
    assert (found[1] - whole(network, [*text, 3, 4])[10:]).abs().max() <= 1e-12


def test_truncated_and_run_again():
    network, room = toy(decoder()), memory()
    text = tokens_of(14)
    cache = PagedCache(room, [room.pool.create_table(text)])
    step(network, cache, [text])
    cache.truncate([9])
    found = step(network, cache, [[5, 6, 7]])[0]
    assert (found - whole(network, [*text[:9], 5, 6, 7])[9:]).abs().max() <= 1e-12


def test_bytes_are_those_of_the_pages_in_use():
    network, room = toy(decoder()), memory(num_pages=10)
    text = tokens_of(9)
    cache = PagedCache(room, [room.pool.create_table(text)])
    step(network, cache, [text])
    numbers_per_token = 2 * 2 * 4 * 2  # key and value, heads, width, layers
    assert cache.num_bytes == 3 * 4 * numbers_per_token * 8


def test_a_full_pool_says_so_and_keeps_its_tables():
    network, room = toy(decoder()), memory(num_pages=2)
    cache = PagedCache(room, [room.pool.create_table([1])])
    step(network, cache, [tokens_of(8)])
    with pytest.raises(OutOfPagesError):
        step(network, cache, [[1]])
    assert cache.tables[0].num_tokens == 8


def test_a_full_pool_leaves_every_row_as_it_was():
    network, room = toy(decoder()), memory(num_pages=3, page_size=2)
    cache = PagedCache(room, [room.pool.create_table([1]), room.pool.create_table([2])])
    step(network, cache, [[1, 2], [3, 4]])
    with pytest.raises(OutOfPagesError):
        step(network, cache, [[5], [6]])
    assert [table.num_tokens for table in cache.tables] == [2, 2]
    cache.tables[1].free()
    found = step(network, PagedCache(room, cache.tables[:1]), [[5]])[0]
    assert (found - whole(network, [1, 2, 5])[2:]).abs().max() <= 1e-12
