"""Cached equals uncached for every kind of model and every split of the tokens; the operations of a cache."""

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
from tests.model.toys import VOCAB, decoder, toy
from tests.toy_presets import shrink

MODELS = {
    name: shrink(preset(name))
    for name in (
        "gpt1", "gpt2", "gpt3-175b", "gopher-280b", "palm-540b", "llama-3.1-8b", "mistral-7b", "smollm3-3b",
        "qwen3-30b-a3b", "gemma-3-1b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "grok-1", "bloom-560m", "mpt-7b",
    )
}  # fmt: skip
STEP_LENGTHS = {"one by one": [1] * 24, "at once": [24], "chunks": [7] * 3 + [3], "mixed": [5, 1, 1, 12, 1, 4]}


def run_cached(network, tokens, step_lengths, cache, mask=None, **options):
    """Run the tokens in steps of these lengths and return all logits."""
    logits, start = [], 0
    for count in step_lengths:
        step_mask = None if mask is None else mask[:, start : start + count]
        logits.append(network(tokens[:, start : start + count], step_mask, cache=cache, **options))
        cache.advance()
        start += count
    return torch.cat(logits, dim=1)


@pytest.fixture(scope="module", params=MODELS, ids=str)
def network(request):
    return toy(MODELS[request.param])


@pytest.fixture
def tokens():
    return torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("step_lengths", STEP_LENGTHS.values(), ids=STEP_LENGTHS)
@torch.no_grad()
def test_cached_equals_uncached(network, tokens, step_lengths):
    for slack in (0, 3, 16):
        found = run_cached(network, tokens, step_lengths, KeyValueCache(network.config, slack))
        assert (found - network(tokens)).abs().max() <= 1e-12


@torch.no_grad()
def test_cached_with_absorbed_latents_equals_uncached(network, tokens):
    found = run_cached(network, tokens, [4] + [1] * 20, KeyValueCache(network.config), absorb=True)
    assert (found - network(tokens)).abs().max() <= 1e-12


@pytest.mark.parametrize("step_lengths", STEP_LENGTHS.values(), ids=STEP_LENGTHS)
@torch.no_grad()
def test_a_left_padded_sequence_equals_the_sequence_alone(network, tokens, step_lengths):
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    found = run_cached(network, tokens, step_lengths, KeyValueCache(network.config), mask)
    alone = network(tokens[1:, 9:])
    assert (found[0] - network(tokens[:1])[0]).abs().max() <= 1e-12
    assert (found[1, 9:] - alone[0]).abs().max() <= 1e-12


@torch.no_grad()
def test_forked_truncated_and_reloaded_caches_equal_uncached(network, tokens, tmp_path):
    full = network(tokens)
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :14], [10, 1, 1, 1, 1], cache)
    fork = cache.fork()
    cache.save(tmp_path / "past.safetensors")
    other = (tokens + 1) % VOCAB
    run_cached(network, other[:, :6], [6], fork)  # must not affect the cache it was forked from
    cache.truncate(10)
    run_cached(network, other[:, 10:12], [2], cache)  # other tokens, truncated again below
    cache.truncate(10)
    assert (run_cached(network, tokens[:, 10:], [14], cache) - full[:, 10:]).abs().max() <= 1e-12
    reloaded = KeyValueCache.load(tmp_path / "past.safetensors", network.config)
    assert reloaded.length == 14
    assert (run_cached(network, tokens[:, 14:], [10], reloaded) - full[:, 14:]).abs().max() <= 1e-12


@torch.no_grad()
def test_selected_sequences_continue_as_uncached(network, tokens):
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :8], [8], cache)
    rows = torch.tensor([1, 0, 1])
    found = run_cached(network, tokens[rows, 8:], [16], cache.select(rows))
    assert (found - network(tokens[rows])[:, 8:]).abs().max() <= 1e-12


@pytest.mark.parametrize("prompt_length", [3, 20])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_reordered_sequences_continue_as_uncached(network, tokens, prompt_length, padded):
    tokens, rows = torch.cat((tokens, tokens.flip(1))), torch.tensor([2, 0, 1, 1])
    mask = torch.arange(24) >= torch.tensor([[0], [2], [1], [0]]) if padded else None
    cache = KeyValueCache(network.config)
    run_cached(network, tokens, [prompt_length], cache, mask)
    cache.reorder(rows)
    rest, rest_mask = tokens[rows, prompt_length:], None if mask is None else mask[rows, prompt_length:]
    found = run_cached(network, rest, [1, 24 - prompt_length - 1], cache, rest_mask)
    expected = network(tokens[rows], None if mask is None else mask[rows])[:, prompt_length:]
    assert (found - expected).abs().max() <= 1e-12


@torch.no_grad()
def test_reorder_needs_a_finished_step_and_one_index_per_sequence(tokens):
    network = toy(MODELS["mistral-7b"])
    cache = KeyValueCache(network.config)
    network(tokens, cache=cache)
    with pytest.raises(AssertionError, match="call advance first"):
        cache.reorder(torch.tensor([1, 0]))
    cache.advance()
    with pytest.raises(AssertionError, match="one sequence for each"):
        cache.reorder(torch.tensor([1]))


@torch.no_grad()
def test_running_again_before_advancing_changes_nothing(network, tokens):
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :9], [9], cache)
    first = network(tokens[:, 9:12], cache=cache)
    network((tokens[:, 9:12] + 3) % VOCAB, cache=cache)
    assert torch.equal(network(tokens[:, 9:12], cache=cache), first)


def test_a_cached_forward_leaves_the_network_unchanged(network, tokens):
    before = {name: id(value) for name, value in vars(network).items()}
    with torch.no_grad():
        first = network(tokens)
        network(tokens[:, :5], cache=KeyValueCache(network.config))
        assert torch.equal(network(tokens), first)
    assert {name: id(value) for name, value in vars(network).items()} == before


# --- the stores


def test_a_contiguous_store_returns_views_and_doubles_its_capacity():
    store = ContiguousStore(capacity=4)
    new = torch.randn(1, 2, 3, 5)
    key, _ = store.write(0, new, new)
    assert key.data_ptr() == store.key.data_ptr()
    store.write(3, new[:, :, :1], new[:, :, :1])
    assert store.key.shape[2] == 4
    store.write(4, new[:, :, :1], new[:, :, :1])
    assert store.key.shape[2] == 8
    assert torch.equal(store.key[:, :, :3], new)


def test_a_store_is_unchanged_after_an_out_of_memory_error(monkeypatch):
    """Otherwise a kernel would write beyond the buffer."""
    store = ContiguousStore(capacity=4)
    new = torch.randn(1, 2, 4, 5)
    store.write(0, new, new)
    request = (4, (1, 2, 5, 5), torch.float32, torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(stores, "grow", Mock(side_effect=RuntimeError("not enough memory")))
        with pytest.raises(RuntimeError, match="not enough memory"):
            store.reserve(*request)
    reserved = store.reserve(*request)
    assert reserved.key.shape[2] == 8
    assert torch.equal(reserved.key[:, :, :4], new)


def test_ring_indices_name_the_token_in_each_slot():
    store = SlidingStore(window=3, slack=1)
    assert store.ring_indices(2).tolist() == [0, 1, EMPTY, EMPTY]
    assert store.ring_indices(6).tolist() == [4, 5, 2, 3]
    assert store.ring_indices(0).tolist() == [EMPTY] * 4


def test_memory_of_a_sliding_window_does_not_grow():
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


def test_a_large_ring_grows_with_the_text():
    network = toy(decoder(pattern=SlidingWindow(size=10**7)))
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        run_cached(network, torch.zeros(1, 30, dtype=torch.long), [1, 29], cache)
        assert cache.stores[0].key.shape[2] == stores._FIRST_RING_SLOTS
        network(torch.zeros(1, 2100, dtype=torch.long), cache=cache)
        cache.advance()
    assert cache.stores[0].key.shape[2] == 2 * stores._FIRST_RING_SLOTS


@pytest.mark.parametrize("step_lengths", STEP_LENGTHS.values(), ids=STEP_LENGTHS)
@pytest.mark.parametrize("name", ["mistral-7b", "gemma-3-1b", "llama-4-scout"])
@torch.no_grad()
def test_rings_that_grow_give_the_results_of_rings_that_do_not(name, tokens, step_lengths, monkeypatch, tmp_path):
    network, rows = toy(MODELS[name]), torch.tensor([1, 0])
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    results = []
    for first_slots in (1, 2, 2048):
        monkeypatch.setattr(stores, "_FIRST_RING_SLOTS", first_slots)
        cache = KeyValueCache(network.config, slack=3)
        found = [run_cached(network, tokens, step_lengths, cache, mask)]
        cache.truncate(22)
        cache.reorder(rows)
        cache.save(tmp_path / "past.safetensors")
        caches = [cache.select(rows), KeyValueCache.load(tmp_path / "past.safetensors", network.config), cache]
        found += [run_cached(network, tokens, [1, 1, 9, 1], each) for each in caches]
        results.append(torch.cat(found, dim=1))
    assert (results[0] - results[2]).abs().max() <= 1e-12
    assert (results[1] - results[2]).abs().max() <= 1e-12


@torch.no_grad()
def test_a_ring_is_usable_after_memory_ran_out_in_one_layer(tokens, monkeypatch):
    """The layers then have rings of different sizes, but one mask."""
    monkeypatch.setattr(stores, "_FIRST_RING_SLOTS", 4)
    network = toy(decoder(pattern=SlidingWindow(size=20)))
    cache = KeyValueCache(network.config)
    run_cached(network, tokens[:, :4], [4], cache)
    grow, calls = stores.grow, []

    def fails_in_the_second_layer(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise RuntimeError("not enough memory")
        return grow(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(stores, "grow", fails_in_the_second_layer)
        with pytest.raises(RuntimeError, match="not enough memory"):
            network(tokens[:, 4:6], cache=cache)
    cache.truncate(2)
    found = run_cached(network, tokens[:, 2:], [1, 1, 1, 5, 14], cache)
    assert (found - network(tokens)[:, 2:]).abs().max() <= 1e-12


def test_a_sliding_window_can_be_truncated_by_its_slack_only():
    network = toy(decoder(pattern=SlidingWindow(size=4)))
    cache = KeyValueCache(network.config, slack=2)
    with torch.no_grad():
        run_cached(network, torch.zeros(1, 12, dtype=torch.long), [12], cache)
    with pytest.raises(ClearheadError, match="a slack of 2 cannot drop 3 tokens"):
        cache.truncate(9)
    cache.truncate(10)
    with pytest.raises(ClearheadError, match="cannot be truncated to 11"):
        cache.truncate(11)


def test_padding_after_real_tokens_is_rejected_with_sliding_windows():
    network = toy(decoder(pattern=SlidingWindow(size=4)))
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with pytest.raises(ClearheadError, match="padding on the left only"):
        network(torch.zeros(1, 5, dtype=torch.long), mask, cache=KeyValueCache(network.config))


def test_loading_a_damaged_file_or_one_of_another_model_raises(tmp_path):
    network = toy(decoder())
    path = tmp_path / "past.safetensors"
    path.write_bytes(b"not a cache")
    with pytest.raises(ClearheadError, match="is not a complete safetensors file"):
        KeyValueCache.load(path, network.config)
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        run_cached(network, torch.zeros(1, 3, dtype=torch.long), [3], cache)
    cache.save(path)
    with pytest.raises(ClearheadError, match="is not a cache of this model"):
        KeyValueCache.load(path, MODELS["mistral-7b"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, metadata: metadata.update(length="-1"), "length -1 is not between 0 and 3"),
        (lambda t, metadata: metadata.update(length="4"), "length 4 is not between 0 and 3"),
        (lambda t, metadata: metadata.update(length="4", furthest="9" * 30), "do not fit 4 tokens|its mask has shape"),
        (lambda t, metadata: metadata.update(length="three"), "invalid literal"),
        (lambda t, metadata: metadata.update(slack="-4"), "slack is -4"),
        (lambda t, metadata: t.update({"0.key": t["0.key"][:, :1]}), "the heads of layer 0 do not match"),
        (lambda t, metadata: t.update({"0.value": t["0.value"][..., :2]}), "the heads of layer 0 do not match"),
        (lambda t, metadata: t.update({"1.key": t["1.key"].int()}), "the heads of layer 1 do not match"),
        (lambda t, metadata: t.update({"1.key": t["1.key"][0]}), "the heads of layer 1 do not match"),
        (
            lambda t, metadata: t.update({f"1.{part}": t[f"1.{part}"][:1] for part in ("key", "value")}),
            "different batch sizes",
        ),
        (lambda t, metadata: t.update(real=t["real"][:, :2]), "its mask has shape"),
        (lambda t, metadata: t.update(real=t["real"].long()), "its mask is torch.int64, not bool"),
        (lambda t, metadata: t.update({"7.key": t["1.key"].clone()}), "it has unknown tensors: 7.key"),
    ],
)
def test_loading_a_file_that_does_not_fit_the_model_raises(tmp_path, change, message):
    network, path = toy(decoder()), tmp_path / "past.safetensors"
    cache = KeyValueCache(network.config)
    with torch.no_grad():
        network(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]]), cache=cache)
    cache.advance()
    cache.save(path)
    assert KeyValueCache.load(path, network.config).length == 3
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, metadata)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    with pytest.raises(ClearheadError, match=f"is not a cache of this model: .*({message})"):
        KeyValueCache.load(path, network.config)


def test_a_cache_rejects_positions_other_batch_sizes_and_bidirectional_layers():
    network = toy(decoder())
    tokens = torch.zeros(2, 3, dtype=torch.long)
    cache = KeyValueCache(network.config)
    with pytest.raises(ClearheadError, match="leave out position_ids and documents"):
        network(tokens, position_ids=torch.arange(3)[None], cache=cache)
    with pytest.raises(ClearheadError, match="leave out position_ids and documents"):
        network(tokens, documents=tokens, cache=cache)
    with torch.no_grad():
        run_cached(network, tokens, [3], cache)
    for length in (3, 0):
        cache.truncate(length)
        with pytest.raises(ClearheadError, match="holds 2 sequences, but the input has 1"):
            network(tokens[:1], cache=cache)
    with pytest.raises(ClearheadError, match="cannot be cached"):
        KeyValueCache(decoder(pattern=Bidirectional()))


def test_an_empty_cache_can_be_saved_and_loaded(tmp_path):
    network, path = toy(decoder()), tmp_path / "past.safetensors"
    KeyValueCache(network.config).save(path)
    assert KeyValueCache.load(path, network.config).length == 0


def test_a_loaded_cache_without_slots_can_be_written(tmp_path):
    network, path = toy(decoder()), tmp_path / "past.safetensors"
    cache = KeyValueCache(network.config)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    with torch.no_grad():
        run_cached(network, tokens, [3], cache)
        empty = {f"{n}.{k}": t[:, :, :0].clone() for n, s in enumerate(cache.stores) for k, t in s.tensors().items()}
        save_file(empty, path, metadata={"length": "0", "furthest": "0", "slack": "16"})
        loaded = KeyValueCache.load(path, network.config)
        assert torch.equal(run_cached(network, tokens, [3], loaded), network(tokens))
