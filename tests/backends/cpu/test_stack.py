"""The decoder in C++ kernels against the modules it replaces: same cache, same logits, for every supported layer."""

import platform

import pytest
import torch

from clearhead.backends.cpu.plan import Plan
from clearhead.backends.cpu.stack import AcceleratedStack, accelerate
from clearhead.backends.cpu_kernels import library
from clearhead.backends.live_checks import unsupported_network_reason
from clearhead.backends.modules import pack_network
from clearhead.cache import KeyValueCache, stores
from clearhead.cache.stores import SlidingStore
from clearhead.generation import TokenSequence, decode
from clearhead.options import SamplingOptions
from tests.backends.networks import logits_of, toy_network
from tests.model.toys import VOCAB

SUPPORTED = ["llama-3.1-8b", "mistral-7b", "qwen3-8b", "gemma-3-1b", "gpt2", "smollm2-135m"]

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no AVX-512 to leave out")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "bloom-560m", "pythia-160m"])
def test_without_avx512_prompts_run_in_the_modules(name, plain_library, monkeypatch):
    monkeypatch.setattr(library, "_loaded", plain_library)
    network, tokens = toy_network(name), torch.randint(0, VOCAB, (3, 14))
    expected, _ = logits_of(network, tokens)
    assert accelerate(network)
    run, lengths = Plan.run, []
    monkeypatch.setattr(Plan, "run", lambda plan, x, *rest: lengths.append(x.shape[1]) or run(plan, x, *rest))
    found, _ = logits_of(network, tokens)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert set(lengths) == {1}


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("padded", [False, True])
def test_single_tokens_give_the_logits_and_cache_of_the_modules(name, padded):
    network = toy_network(name)
    tokens = torch.randint(0, VOCAB, (3, 14), generator=torch.Generator().manual_seed(1))
    mask = None
    if padded:
        mask = torch.ones(3, 14, dtype=torch.bool)
        mask[0, :3] = mask[2, :1] = False
    expected, plain_cache = logits_of(network, tokens, mask)
    assert accelerate(network)
    found, cache = logits_of(network, tokens, mask)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(cache.stores, plain_cache.stores, strict=True):
        torch.testing.assert_close(ours.key, theirs.key, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("padded", [False, True])
def test_prompts_give_the_logits_and_cache_of_the_modules(name, padded):
    """Twenty tokens at once, which use the kernels for many rows; then ten more, and single tokens."""
    network = toy_network(name)
    tokens = torch.randint(0, VOCAB, (3, 32), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 32, dtype=torch.bool)
    mask[0, :7] = not padded
    logits, caches = [], []
    for _ in range(2):
        cache = KeyValueCache(network.config)
        with torch.no_grad():
            for start, end in ((0, 20), (20, 30), (30, 31), (31, 32)):
                step_mask = mask[:, start:end] if padded else None
                hidden = network.hidden_states(tokens[:, start:end], step_mask, cache=cache)
                cache.advance()
                logits.append(network.compute_logits(hidden)[mask[:, start:end]])
        caches.append(cache)
        assert accelerate(network)
    for found, expected in zip(logits[4:], logits[:4], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(caches[1].stores, caches[0].stores, strict=True):
        torch.testing.assert_close(ours.key[0, :, 8:32], theirs.key[0, :, 8:32], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(ours.value[1, :, :32], theirs.value[1, :, :32], atol=2e-4, rtol=1e-4)


def test_prompts_of_every_length_up_to_seventy():
    network = toy_network("llama-3.1-8b")
    tokens = torch.randint(0, VOCAB, (1, 70))
    with torch.no_grad():
        expected = network.hidden_states(tokens)
        accelerate(network)
        for length in range(1, 71):
            found = network.hidden_states(tokens[:, :length], cache=KeyValueCache(network.config))
            torch.testing.assert_close(found, expected[:, :length], atol=2e-4, rtol=1e-4)


def test_sliding_windows_keep_their_ring_buffers():
    network = toy_network("mistral-7b")
    accelerate(network)
    _, cache = logits_of(network, torch.randint(0, VOCAB, (1, 30)))
    assert isinstance(cache.stores[0], SlidingStore)


@pytest.mark.parametrize("name", ["mistral-7b", "gemma-3-1b"])
def test_rings_grow_under_the_kernels(name, monkeypatch):
    monkeypatch.setattr(stores, "_FIRST_RING_SLOTS", 2)
    network, tokens = toy_network(name), torch.randint(0, VOCAB, (2, 40))
    expected, _ = logits_of(network, tokens, prompt_length=1)
    assert accelerate(network)
    found, _ = logits_of(network, tokens, prompt_length=1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["marian", "bart-base", "transformer-base", "t5-small", "umt5-small", "annotated-transformer"]
)
def test_encoder_decoders_give_the_logits_of_the_modules(name):
    network = toy_network(name)
    source = torch.randint(0, VOCAB, (3, 7))
    source_mask = torch.ones(3, 7, dtype=torch.bool)
    source_mask[1, 4:] = False
    tokens = torch.randint(0, VOCAB, (3, 9))
    with torch.no_grad():
        encoder_output = network.precompute_cross_attention(network.encode(source, source_mask))
    expected, _ = logits_of(network, tokens, encoder_output=encoder_output, prompt_length=1)
    assert accelerate(network), unsupported_network_reason(network, "cpu")
    found, _ = logits_of(network, tokens, encoder_output=encoder_output, prompt_length=1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_packed_weights_differ_from_their_unpacked_values_only_by_the_rounding_of_inputs(bits):
    network = pack_network(toy_network("llama-3.1-8b"), bits)
    for prompt_length in (5, 20):
        tokens = torch.randint(0, VOCAB, (2, prompt_length + 7))
        with torch.enable_grad():  # the modules then compute with unpacked weights
            unpacked = network(tokens)[:, prompt_length - 1 :]
        accelerate(network)
        found, _ = logits_of(network, tokens, prompt_length=prompt_length)
        assert (found - unpacked).norm() / unpacked.norm() < 0.05


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
def test_a_bfloat16_network_has_a_bfloat16_cache(bits):
    network = toy_network("llama-3.1-8b", torch.bfloat16)
    if bits:
        pack_network(network, bits)
    tokens = torch.randint(0, VOCAB, (2, 10))
    expected, _ = logits_of(network, tokens)
    accelerate(network)
    found, cache = logits_of(network, tokens)
    assert cache.stores[0].key.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < 0.05


def test_a_changed_key_in_the_cache_changes_the_logits():
    """A control: the comparisons above would detect a wrong cache."""
    network = toy_network("llama-3.1-8b")
    accelerate(network)
    tokens = torch.randint(0, VOCAB, (1, 10))
    expected, _ = logits_of(network, tokens)
    with torch.no_grad():
        cache = KeyValueCache(network.config)
        network.hidden_states(tokens[:, :9], cache=cache)
        cache.advance()
        cache.stores[0].key[:, :, 2] += 1
        found = network.compute_logits(network.hidden_states(tokens[:, 9:], cache=cache)[:, -1])
    assert (found - expected[:, -1]).abs().max() > 1e-3


def test_alternating_between_caches_and_selecting_rows_does_not_mix_them():
    network = toy_network("llama-3.1-8b")
    accelerate(network)
    tokens = torch.randint(0, VOCAB, (2, 8))
    expected, _ = logits_of(network, tokens)
    with torch.no_grad():
        first, second = KeyValueCache(network.config), KeyValueCache(network.config)
        for cache, batch in ((first, tokens), (second, tokens.flip(0))):
            network.hidden_states(batch[:, :6], cache=cache)
            cache.advance()
        for position in (6, 7):
            logits = []
            for cache, batch in ((first, tokens), (second, tokens.flip(0))):
                hidden = network.hidden_states(batch[:, position : position + 1], cache=cache)
                logits.append(network.compute_logits(hidden[:, -1]))
                cache.advance()
            first, second = first.select(torch.tensor([0, 1])), second.select(torch.tensor([0, 1]))
    torch.testing.assert_close(logits[0], expected[:, -1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1].flip(0), expected[:, -1], atol=1e-4, rtol=1e-4)


def test_casting_the_network_creates_a_new_plan():
    network = toy_network("llama-3.1-8b")
    accelerate(network)
    tokens = torch.randint(0, VOCAB, (1, 8))
    before, _ = logits_of(network, tokens)
    with torch.no_grad():
        network.double().float()
        for parameter in network.parameters():
            parameter.mul_(1)
    after, _ = logits_of(network, tokens)
    torch.testing.assert_close(after, before)


def test_the_decode_loop_generates_the_same_tokens():
    network = toy_network("llama-3.1-8b")
    options = SamplingOptions(max_new_tokens=12)
    plain, accelerated = (
        [TokenSequence([1, 2, 3], options), TokenSequence([4, 5], options)],
        [TokenSequence([1, 2, 3], options), TokenSequence([4, 5], options)],
    )
    for _ in decode(network, plain):
        pass
    accelerate(network)
    assert isinstance(network.decoder, AcceleratedStack)
    for _ in decode(network, accelerated):
        pass
    assert [sequence.tokens for sequence in accelerated] == [sequence.tokens for sequence in plain]


@pytest.mark.parametrize("name", ["gopher-280b", "bert-base"])
def test_an_unsupported_network_stays_unchanged(name):
    network = toy_network(name)
    assert unsupported_network_reason(network, "cpu")
    assert not accelerate(network)
    assert not isinstance(network.decoder, AcceleratedStack)
