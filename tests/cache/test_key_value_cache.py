"""Cached equals uncached, for every kind of model, however the tokens arrive; and what a cache can do."""

from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from clearhead.architecture import Bidirectional, SlidingWindow
from clearhead.cache import stores
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.stores import EMPTY, ContiguousStore, SlidingStore
from clearhead.errors import ClearheadError
from clearhead.families import preset
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, decoder, toy

MODELS = {
    name: shrink(preset(name))
    for name in (
        "gpt1", "gpt2", "gpt3-175b", "gopher-280b", "palm-540b", "llama-3.1-8b", "mistral-7b", "smollm3-3b",
        "qwen3-30b-a3b", "gemma-3-1b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "grok-1", "bloom-560m", "mpt-7b",
    )
}  # fmt: skip
ARRIVALS = {"one by one": [1] * 24, "at once": [24], "chunks": [7] * 3 + [3], "mixed": [5, 1, 1, 12, 1, 4]}


def run_cached(network, tokens, arrivals, cache, mask=None, **options):
    pieces, start = [], 0
    for count in arrivals:
        piece = None if mask is None else mask[:, start : start + count]
        pieces.append(network(tokens[:, start : start + count], piece, cache=cache, **options))
        cache.advance()
        start += count
    return torch.cat(pieces, dim=1)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def network(request):
    return toy(MODELS[request.param])


@pytest.fixture
def tokens():
    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("arrivals", ARRIVALS.values(), ids=ARRIVALS)
@torch.no_grad()
def test_cached_equals_uncached(network, tokens, arrivals):
    for slack in (0, 3, 16):
        found = run_cached(network, tokens, arrivals, KeyValueCache(network.config, slack))
        assert (found - network(tokens)).abs().max() <= 1e-12


@torch.no_grad()
def test_absorbed_latents_equal_uncached(network, tokens):
    found = run_cached(network, tokens, [4] + [1] * 20, KeyValueCache(network.config), absorb=True)
    assert (found - network(tokens)).abs().max() <= 1e-12


@pytest.mark.parametrize("arrivals", ARRIVALS.values(), ids=ARRIVALS)
@torch.no_grad()
def test_left_padded_rows_equal_the_same_alone(network, tokens, arrivals):
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    found = run_cached(network, tokens, arrivals, KeyValueCache(network.config), mask)
    alone = network(tokens[1:, 9:])
    assert (found[0] - network(tokens[:1])[0]).abs().max() <= 1e-12
    assert (found[1, 9:] - alone[0]).abs().max() <= 1e-12


@torch.no_grad()
def test_forked_truncated_and_reloaded(network, tokens, tmp_path):
    full = network(tokens)
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :14], [10, 1, 1, 1, 1], cache)
    fork = cache.fork()
    cache.save(tmp_path / "past.safetensors")
    other = (tokens + 1) % VOCAB
    run_cached(network, other[:, :6], [6], fork)  # the fork goes its own way
    cache.truncate(10)
    run_cached(network, other[:, 10:12], [2], cache)  # and comes back
    cache.truncate(10)
    assert (run_cached(network, tokens[:, 10:], [14], cache) - full[:, 10:]).abs().max() <= 1e-12
    reloaded = KeyValueCache.load(tmp_path / "past.safetensors", network.config)
    assert reloaded.length == 14
    assert (run_cached(network, tokens[:, 14:], [10], reloaded) - full[:, 14:]).abs().max() <= 1e-12


@torch.no_grad()
def test_selected_rows_go_on(network, tokens):
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :8], [8], cache)
    rows = torch.tensor([1, 0, 1])
    found = run_cached(network, tokens[rows, 8:], [16], cache.select(rows))
    assert (found - network(tokens[rows])[:, 8:]).abs().max() <= 1e-12


@pytest.mark.parametrize("begin", [3, 20])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_rows_in_another_order_go_on(network, tokens, begin, padded):
    tokens, rows = torch.cat((tokens, tokens.flip(1))), torch.tensor([2, 0, 1, 1])
    mask = torch.arange(24) >= torch.tensor([[0], [2], [1], [0]]) if padded else None
    cache = KeyValueCache(network.config)
    run_cached(network, tokens, [begin], cache, mask)
    cache.reorder(rows)
    left, seen = tokens[rows, begin:], None if mask is None else mask[rows, begin:]
    found = run_cached(network, left, [1, 24 - begin - 1], cache, seen)
    expected = network(tokens[rows], None if mask is None else mask[rows])[:, begin:]
    assert (found - expected).abs().max() <= 1e-12


@torch.no_grad()
def test_rows_change_places_between_two_steps_only(tokens):
    network = toy(MODELS["mistral-7b"])
    cache = KeyValueCache(network.config)
    network(tokens, cache=cache)
    with pytest.raises(AssertionError, match="advance first"):
        cache.reorder(torch.tensor([1, 0]))
    cache.advance()
    with pytest.raises(AssertionError, match="a row for each"):
        cache.reorder(torch.tensor([1]))


@torch.no_grad()
def test_running_again_before_advancing_changes_nothing(network, tokens):
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :9], [9], cache)
    once = network(tokens[:, 9:12], cache=cache)
    network((tokens[:, 9:12] + 3) % VOCAB, cache=cache)
    assert torch.equal(network(tokens[:, 9:12], cache=cache), once)


def test_the_network_keeps_nothing(network, tokens):
    before = {name: id(value) for name, value in vars(network).items()}
    with torch.no_grad():
        first = network(tokens)
        network(tokens[:, :5], cache=KeyValueCache(network.config))
        assert torch.equal(network(tokens), first)
    assert {name: id(value) for name, value in vars(network).items()} == before


# --- the stores


def test_a_contiguous_store_gives_views_and_doubles():
    store = ContiguousStore(capacity=4)
    new = torch.randn(1, 2, 3, 5)
    key, _ = store.write(0, new, new)
    assert key.data_ptr() == store.key.data_ptr()
    store.write(3, new[:, :, :1], new[:, :, :1])
    assert store.key.shape[2] == 4
    store.write(4, new[:, :, :1], new[:, :, :1])
    assert store.key.shape[2] == 8
    assert torch.equal(store.key[:, :, :3], new)


def test_a_store_is_as_before_where_memory_runs_out(monkeypatch):
    """Otherwise a kernel would be given a place beyond its buffer."""
    store = ContiguousStore(capacity=4)
    new = torch.randn(1, 2, 4, 5)
    store.write(0, new, new)
    wanted = (4, (1, 2, 5), torch.float32, torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(stores, "grown", Mock(side_effect=RuntimeError("not enough memory")))
        with pytest.raises(RuntimeError, match="not enough memory"):
            store.reserve(*wanted)
    place = store.reserve(*wanted)
    assert place.key.shape[2] == 8
    assert torch.equal(place.key[:, :, :4], new)


def test_a_ring_names_what_it_holds():
    store = SlidingStore(window=3, slack=1)
    assert store.ring(2).tolist() == [0, 1, EMPTY, EMPTY]
    assert store.ring(6).tolist() == [4, 5, 2, 3]
    assert store.ring(0).tolist() == [EMPTY] * 4


def test_memory_of_a_window_does_not_grow():
    network = toy(decoder(pattern=SlidingWindow(size=4)))
    cache = KeyValueCache(network.config, slack=2)
    sizes = set()
    with torch.no_grad():
        for _ in range(20):
            network(torch.zeros(1, 1, dtype=torch.long), cache=cache)
            cache.advance()
            sizes.add(cache.allocated_bytes)
    assert len(sizes) == 1
    assert cache.num_bytes == cache.allocated_bytes


def test_a_window_goes_back_only_so_far():
    network = toy(decoder(pattern=SlidingWindow(size=4)))
    cache = KeyValueCache(network.config, slack=2)
    with torch.no_grad():
        run_cached(network, torch.zeros(1, 12, dtype=torch.long), [12], cache)
    with pytest.raises(ClearheadError, match="can go back by 2 tokens, not 3"):
        cache.truncate(9)
    cache.truncate(10)
    with pytest.raises(ClearheadError, match="cannot be cut to 11"):
        cache.truncate(11)


def test_padding_in_the_middle_of_a_window_is_refused():
    network = toy(decoder(pattern=SlidingWindow(size=4)))
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with pytest.raises(ClearheadError, match="padding on the left only"):
        network(torch.zeros(1, 5, dtype=torch.long), mask, cache=KeyValueCache(network.config))


def test_a_damaged_file_is_one_sentence(tmp_path):
    network = toy(decoder())
    path = tmp_path / "past.safetensors"
    path.write_bytes(b"not a cache")
    with pytest.raises(ClearheadError, match="is not a cache of this model"):
        KeyValueCache.load(path, network.config)
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        run_cached(network, torch.zeros(1, 3, dtype=torch.long), [3], cache)
    cache.save(path)
    with pytest.raises(ClearheadError, match="is not a cache of this model"):
        KeyValueCache.load(path, MODELS["mistral-7b"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t, about: about.update(length="-1"), "-1 tokens of at most 3"),
        (lambda t, about: about.update(length="4"), "4 tokens of at most 3"),
        (lambda t, about: about.update(length="4", furthest="9" * 30), "for 4 tokens|padding of shape"),
        (lambda t, about: about.update(length="three"), "invalid literal"),
        (lambda t, about: about.update(slack="-4"), "slack is -4"),
        (lambda t, about: t.update({"0.key": t["0.key"][:, :1]}), "layer 0 has other heads"),
        (lambda t, about: t.update({"0.value": t["0.value"][..., :2]}), "layer 0 has other heads"),
        (lambda t, about: t.update({"1.key": t["1.key"].int()}), "layer 1 has other heads"),
        (lambda t, about: t.update({"1.key": t["1.key"][0]}), "layer 1 has other heads"),
        (lambda t, about: t.update({f"1.{part}": t[f"1.{part}"][:1] for part in ("key", "value")}), "numbers of rows"),
        (lambda t, about: t.update(real=t["real"][:, :2]), "padding of shape"),
        (lambda t, about: t.update(real=t["real"].long()), "padding of another type"),
        (lambda t, about: t.update({"7.key": t["1.key"].clone()}), "it holds 7.key besides"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, sentence):
    network, path = toy(decoder()), tmp_path / "past.safetensors"
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        network(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]]), cache=cache)
    cache.advance()
    cache.save(path)
    assert KeyValueCache.load(path, network.config).length == 3
    with safe_open(path, framework="pt") as file:
        tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, about)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=about)
    with pytest.raises(ClearheadError, match=f"is not a cache of this model: .*({sentence})"):
        KeyValueCache.load(path, network.config)


def test_what_a_cache_cannot_take():
    network = toy(decoder())
    tokens = torch.zeros(2, 3, dtype=torch.long)
    cache = KeyValueCache(network.config)
    with pytest.raises(ClearheadError, match="give neither position_ids nor documents"):
        network(tokens, position_ids=torch.arange(3)[None], cache=cache)
    with pytest.raises(ClearheadError, match="give neither position_ids nor documents"):
        network(tokens, documents=tokens, cache=cache)
    with torch.no_grad():
        run_cached(network, tokens, [3], cache)
    for length in (3, 0):
        cache.truncate(length)
        with pytest.raises(ClearheadError, match="holds 2 rows, and 1 came in"):
            network(tokens[:1], cache=cache)
    with pytest.raises(ClearheadError, match="cannot be cached"):
        KeyValueCache(decoder(pattern=Bidirectional()))


def test_an_empty_cache_is_kept_too(tmp_path):
    network, path = toy(decoder()), tmp_path / "past.safetensors"
    KeyValueCache(network.config).save(path)
    assert KeyValueCache.load(path, network.config).length == 0


def test_a_file_without_slots_takes_tokens_again(tmp_path):
    network, path = toy(decoder()), tmp_path / "past.safetensors"
    cache = KeyValueCache(network.config)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        run_cached(network, tokens, [3], cache)
        cut = {f"{n}.{k}": t[:, :, :0].clone() for n, s in enumerate(cache.stores) for k, t in s.tensors().items()}
        save_file(cut, path, metadata={"length": "0", "furthest": "0", "slack": "16"})
        again = KeyValueCache.load(path, network.config)
        assert torch.equal(run_cached(network, tokens, [3], again), network(tokens))
