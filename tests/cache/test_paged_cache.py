"""The paged cache against the uncached forward pass: sequences of different length, shared prefixes, copy-on-write."""

import pytest
import torch

from clearhead.cache.page_pool import OutOfPagesError, PagePool
from clearhead.cache.page_storage import PageStorage
from clearhead.cache.paged_cache import PagedCache
from clearhead.families import preset
from tests.model.toys import VOCAB, decoder, toy
from tests.toy_presets import shrink

NAMES = ("gpt2", "llama-3.1-8b", "mistral-7b", "gemma-3-1b", "deepseek-v3", "llama-4-scout", "bloom-560m")


def new_storage(num_pages=40, page_size=4):
    return PageStorage(PagePool(num_pages, page_size))


def random_tokens(count, seed=0):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def step(network, cache, rows):
    """Run the new tokens of each sequence, left-padded, and return the logits of each sequence's own tokens."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    logits = network(tokens, mask, cache=cache)
    cache.advance()
    return [logits[number, longest - len(row) :] for number, row in enumerate(rows)]


@torch.no_grad()
def uncached(network, tokens):
    """Return the logits of one sequence, computed without a cache."""
    return network(torch.tensor([tokens]))[0]


@pytest.mark.parametrize("name", NAMES)
def test_sequences_of_different_length_equal_uncached(name):
    network = toy(shrink(preset(name)))
    texts = [random_tokens(20, 1), random_tokens(11, 2), random_tokens(15, 3)]
    cache = PagedCache(storage := new_storage(), [storage.pool.create_table(text) for text in texts])
    found = [[], [], []]
    for starts, stops in (((0, 0, 0), (9, 2, 5)), ((9, 2, 5), (10, 3, 6)), ((10, 3, 6), (20, 11, 15))):
        pieces = step(network, cache, [text[a:b] for text, a, b in zip(texts, starts, stops, strict=True)])
        for logits, piece in zip(found, pieces, strict=True):
            logits.append(piece)
    for text, pieces in zip(texts, found, strict=True):
        assert (torch.cat(pieces) - uncached(network, text)).abs().max() <= 1e-12


def test_a_later_prompt_reuses_a_published_prefix():
    network, storage = toy(decoder()), new_storage()
    text = random_tokens(18)
    step(network, PagedCache(storage, [storage.pool.create_table(text)]), [text])
    other = text[:13] + random_tokens(5, 9)
    table = storage.pool.create_table(other)
    assert table.num_tokens == 12  # three full pages of four
    found = step(network, PagedCache(storage, [table]), [other[12:]])[0]
    assert (found - uncached(network, other)[12:]).abs().max() <= 1e-12


def test_forked_tables_share_pages_until_they_write():
    network, storage = toy(decoder()), new_storage()
    text = random_tokens(10)
    first = storage.pool.create_table(text)
    step(network, PagedCache(storage, [first]), [text])
    used = storage.pool.num_used
    second = first.fork()
    assert storage.pool.num_used == used
    found = step(network, PagedCache(storage, [first, second]), [[1, 2], [3, 4]])
    assert storage.pool.num_used == used + 1  # only the page that both wrote to
    assert (found[0] - uncached(network, [*text, 1, 2])[10:]).abs().max() <= 1e-12
    assert (found[1] - uncached(network, [*text, 3, 4])[10:]).abs().max() <= 1e-12


def test_a_truncated_cache_continues_as_uncached():
    network, storage = toy(decoder()), new_storage()
    text = random_tokens(14)
    cache = PagedCache(storage, [storage.pool.create_table(text)])
    step(network, cache, [text])
    cache.truncate([9])
    found = step(network, cache, [[5, 6, 7]])[0]
    assert (found - uncached(network, [*text[:9], 5, 6, 7])[9:]).abs().max() <= 1e-12


def test_num_bytes_counts_the_used_pages():
    network, storage = toy(decoder()), new_storage(num_pages=10)
    text = random_tokens(9)
    cache = PagedCache(storage, [storage.pool.create_table(text)])
    step(network, cache, [text])
    numbers_per_token = 2 * 2 * 4 * 2  # key and value, heads, width, layers
    assert cache.num_bytes == 3 * 4 * numbers_per_token * 8


def test_a_full_pool_raises_and_leaves_the_table_unchanged():
    network, storage = toy(decoder()), new_storage(num_pages=2)
    cache = PagedCache(storage, [storage.pool.create_table([1])])
    step(network, cache, [random_tokens(8)])
    with pytest.raises(OutOfPagesError):
        step(network, cache, [[1]])
    assert cache.tables[0].num_tokens == 8


def test_a_full_pool_leaves_every_sequence_unchanged():
    network, storage = toy(decoder()), new_storage(num_pages=3, page_size=2)
    cache = PagedCache(storage, [storage.pool.create_table([1]), storage.pool.create_table([2])])
    step(network, cache, [[1, 2], [3, 4]])
    with pytest.raises(OutOfPagesError):
        step(network, cache, [[5], [6]])
    assert [table.num_tokens for table in cache.tables] == [2, 2]
    cache.tables[1].free()
    found = step(network, PagedCache(storage, cache.tables[:1]), [[5]])[0]
    assert (found - uncached(network, [1, 2, 5])[2:]).abs().max() <= 1e-12
