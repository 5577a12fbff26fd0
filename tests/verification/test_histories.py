"""Whatever a cache has been through, the next tokens are read as if all before them were read anew.

A history is a random row of steps: tokens read in pieces, read and dropped, taken back, rows chosen anew, saved.
"""

import random

import pytest
import torch

from clearhead.cache.cache import KeyValueCache
from clearhead.cache.stores import SlidingStore
from clearhead.errors import ClearheadError
from clearhead.generation.decode import pad_left
from tests.verification.models import VOCAB, toy_model

STEPS, LONGEST = 12, 150


class History:
    def __init__(self, network, folder, seed):
        self.network, self.path = network, folder / "past.safetensors"
        self.random = random.Random(seed)
        lengths = self.random.choice([(9,), (26,), (8, 8), (3, 17, 30)])
        self.rows = [self.tokens(length) for length in lengths]
        self.cache = KeyValueCache(network.config, slack=self.random.choice([0, 3, 16]))
        tokens, mask = pad_left(self.rows, torch.device("cpu"))
        size = self.random.choice([1, 4, 50])
        for start in range(0, tokens.shape[1], size):
            network(
                tokens[:, start : start + size],
                None if mask is None else mask[:, start : start + size],
                cache=self.cache,
            )
            self.cache.advance()

    def tokens(self, count):
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def read(self):
        """How far the next tokens are from what each row gives alone; they join the past."""
        new = self.look()
        self.cache.advance()
        self.rows = [row + piece for row, piece in zip(self.rows, new, strict=True)]

    def look(self):
        """The same, but nothing joins the past."""
        count = self.random.choice([1, 1, 2, 5, 17, 30])
        new = [self.tokens(count) for _ in self.rows]
        found = self.network(torch.tensor(new), cache=self.cache)
        for logits, row, piece in zip(found, self.rows, new, strict=True):
            alone = self.network(torch.tensor([row + piece]))[0, -count:]
            assert (logits - alone).abs().max() <= 1e-9
        return new

    def drop(self):
        self.look()
        self.cache.truncate(self.cache.length)
        self.cache.advance()

    def go_back(self):
        count = self.random.choice([1, 2, 3, 10, 16])
        if count >= min(map(len, self.rows)):
            return
        try:
            self.cache.truncate(self.cache.length - count)
        except ClearheadError:
            assert any(isinstance(store, SlidingStore) for store in self.cache.stores)
            return
        self.rows = [row[:-count] for row in self.rows]

    def select(self):
        order = [self.random.randrange(len(self.rows)) for _ in range(self.random.randint(1, 3))]
        self.cache = self.cache.select(torch.tensor(order))
        self.rows = [list(self.rows[row]) for row in order]

    def fork(self):
        other = self.cache.fork()
        self.network(torch.tensor([self.tokens(3) for _ in self.rows]), cache=other)
        other.advance()

    def save(self):
        self.cache.save(self.path)
        self.cache = KeyValueCache.load(self.path, self.network.config)

    def live(self):
        turns = (self.read, self.read, self.look, self.drop, self.go_back, self.select, self.fork, self.save)
        for _ in range(STEPS):
            if max(map(len, self.rows)) > LONGEST - 30:
                return
            self.random.choice(turns)()
        self.read()


@pytest.mark.parametrize("style", ["llama", "mistral", "gemma3", "llama4", "deepseek", "gopher", "gpt3"])
@torch.inference_mode()
def test_the_past_does_not_show(style, tmp_path):
    network = toy_model(style, torch.float64).network
    for seed in range(20):
        History(network, tmp_path, seed).live()


@pytest.mark.parametrize("count", [2, 17, 30])
@torch.inference_mode()
def test_more_tokens_than_a_ring_takes_in_place_can_be_read_and_dropped(count):
    network = toy_model("mistral", torch.float64).network
    tokens = torch.randint(0, VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = KeyValueCache(network.config, slack=0)
    network(tokens[:, :25], cache=cache)
    cache.advance()
    network((tokens[:, 25 : 25 + count] + 1) % VOCAB, cache=cache)
    assert (network(tokens[:, 25:], cache=cache) - network(tokens)[:, 25:]).abs().max() <= 1e-12


@torch.inference_mode()
def test_a_ring_does_not_go_back_step_by_step_beyond_what_it_holds():
    network = toy_model("mistral", torch.float64).network
    cache = KeyValueCache(network.config, slack=4)
    network(torch.zeros(1, 40, dtype=torch.long), cache=cache)
    cache.advance()
    cache.truncate(36)
    with pytest.raises(ClearheadError, match="can go back by 4 tokens, not 5"):
        cache.truncate(35)
    cache.truncate(0)
    assert cache.furthest == 0
