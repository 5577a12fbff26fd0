"""Test that after any history of operations a cache gives the logits of a full forward pass.

A history is a random sequence of operations: read tokens in chunks, read and drop them, truncate, select, fork, save.
"""

import random

import pytest
import torch

from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.stores import SlidingStore
from clearhead.errors import ClearheadError
from clearhead.generation import pad_left
from tests.verification.models import VOCAB, toy_model

NUM_OPERATIONS, MAX_LENGTH = 12, 150


class History:
    """A cache with its sequences, and random operations on it that check every logit."""

    def __init__(self, network, folder, seed):
        self.network, self.path = network, folder / "past.safetensors"
        self.random = random.Random(seed)
        lengths = self.random.choice([(9,), (26,), (8, 8), (3, 17, 30)])
        self.sequences = [self.random_tokens(length) for length in lengths]
        self.cache = KeyValueCache(network.config, slack=self.random.choice([0, 3, 16]))
        tokens, mask = pad_left(self.sequences, torch.device("cpu"))
        size = self.random.choice([1, 4, 50])
        for start in range(0, tokens.shape[1], size):
            network(
                tokens[:, start : start + size],
                None if mask is None else mask[:, start : start + size],
                cache=self.cache,
            )
            self.cache.advance()

    def random_tokens(self, count):
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def read(self):
        """Read new tokens, check their logits and add them to the cache."""
        new = self.read_without_advancing()
        self.cache.advance()
        self.sequences = [past + tokens for past, tokens in zip(self.sequences, new, strict=True)]

    def read_without_advancing(self):
        """Read new tokens and check their logits."""
        count = self.random.choice([1, 1, 2, 5, 17, 30])
        new = [self.random_tokens(count) for _ in self.sequences]
        batched = self.network(torch.tensor(new), cache=self.cache)
        for logits, past, tokens in zip(batched, self.sequences, new, strict=True):
            expected = self.network(torch.tensor([past + tokens]))[0, -count:]
            assert (logits - expected).abs().max() <= 1e-9
        return new

    def drop(self):
        self.read_without_advancing()
        self.cache.truncate(self.cache.length)
        self.cache.advance()

    def truncate(self):
        count = self.random.choice([1, 2, 3, 10, 16])
        if count >= min(map(len, self.sequences)):
            return
        try:
            self.cache.truncate(self.cache.length - count)
        except ClearheadError:
            assert any(isinstance(store, SlidingStore) for store in self.cache.stores)
            return
        self.sequences = [sequence[:-count] for sequence in self.sequences]

    def select(self):
        order = [self.random.randrange(len(self.sequences)) for _ in range(self.random.randint(1, 3))]
        self.cache = self.cache.select(torch.tensor(order))
        self.sequences = [list(self.sequences[index]) for index in order]

    def fork(self):
        other = self.cache.fork()
        self.network(torch.tensor([self.random_tokens(3) for _ in self.sequences]), cache=other)
        other.advance()

    def save(self):
        self.cache.save(self.path)
        self.cache = KeyValueCache.load(self.path, self.network.config)

    def run(self):
        operations = (
            self.read,
            self.read,
            self.read_without_advancing,
            self.drop,
            self.truncate,
            self.select,
            self.fork,
            self.save,
        )
        for _ in range(NUM_OPERATIONS):
            if max(map(len, self.sequences)) > MAX_LENGTH - 30:
                return
            self.random.choice(operations)()
        self.read()


@pytest.mark.parametrize("style", ["llama", "mistral", "gemma3", "llama4", "deepseek", "gopher", "gpt3"])
@torch.inference_mode()
def test_logits_do_not_depend_on_the_history_of_the_cache(style, tmp_path):
    network = toy_model(style, torch.float64).network
    for seed in range(20):
        History(network, tmp_path, seed).run()


@pytest.mark.parametrize("count", [2, 17, 30])
@torch.inference_mode()
def test_more_tokens_than_the_slack_can_be_read_and_dropped(count):
    network = toy_model("mistral", torch.float64).network
    tokens = torch.randint(0, VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = KeyValueCache(network.config, slack=0)
    network(tokens[:, :25], cache=cache)
    cache.advance()
    network((tokens[:, 25 : 25 + count] + 1) % VOCAB, cache=cache)
    assert (network(tokens[:, 25:], cache=cache) - network(tokens)[:, 25:]).abs().max() <= 1e-12


@torch.inference_mode()
def test_a_sliding_store_cannot_be_truncated_beyond_its_slack():
    network = toy_model("mistral", torch.float64).network
    cache = KeyValueCache(network.config, slack=4)
    network(torch.zeros(1, 40, dtype=torch.long), cache=cache)
    cache.advance()
    cache.truncate(36)
    with pytest.raises(ClearheadError, match="a slack of 4 cannot drop 5 tokens"):
        cache.truncate(35)
    cache.truncate(0)
    assert cache.peak_length == 0
