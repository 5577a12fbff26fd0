"""The step in kernels against the modules it stands for: same cache, same logits, for every kind of layer it knows."""

import platform

import pytest
import torch

from clearhead.backends.cpu.plan import Plan
from clearhead.backends.cpu.stack import AcceleratedStack, accelerate
from clearhead.backends.cpu_kernels import library as cpu
from clearhead.backends.live_checks import unsupported_network_reason
from clearhead.backends.modules import pack_network
from clearhead.cache.key_value_cache import KeyValueCache
from clearhead.cache.stores import SlidingStore
from clearhead.families import preset
from clearhead.generation import TokenSequence, decode
from clearhead.model.transformer import Transformer
from clearhead.options import SamplingOptions
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, redraw

KNOWN = ["llama-3.1-8b", "mistral-7b", "qwen3-8b", "gemma-3-1b", "gpt2", "smollm2-135m"]


pytestmark = pytest.mark.usefixtures("kernels")


def network_of(name: str, dtype=torch.float32) -> Transformer:
    torch.manual_seed(0)
    network = Transformer(shrink(preset(name)))
    redraw(network)
    return network.to(dtype).eval()


@torch.no_grad()
def logits_of(network, tokens, mask=None, encoder_output=None, prompt=5):
    """Of every step after the prompt, (B, T, V), by a cache."""
    cache, steps = KeyValueCache(network.config), []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens.shape[1]))]:
        seen = None if mask is None else mask[:, start:end]
        hidden = network.hidden_states(tokens[:, start:end], seen, encoder_output=encoder_output, cache=cache)
        cache.advance()
        steps.append(network.compute_logits(hidden[:, -1]))
    return torch.stack(steps, dim=1).float(), cache


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere every test runs so")
def test_without_large_vectors_modules_read_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "FLAGS", (*cpu.FLAGS, "-mno-avx512f"))
    cpu.compile_library(tmp_path / "plain.so")
    monkeypatch.setattr(cpu, "_loaded", cpu.open_library(tmp_path / "plain.so"))
    network, tokens = network_of("llama-3.1-8b"), torch.randint(0, VOCAB, (3, 14))
    expected, _ = logits_of(network, tokens)
    assert accelerate(network)
    run, lengths = Plan.run, []
    monkeypatch.setattr(Plan, "run", lambda plan, x, *rest: lengths.append(x.shape[1]) or run(plan, x, *rest))
    found, _ = logits_of(network, tokens)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert set(lengths) == {1}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("padded", [False, True])
def test_the_step_is_the_network(name, padded):
    network = network_of(name)
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


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_is_the_network(name, padded):
    """More tokens than a step has, so that products and attention take the other road; then some more, and steps."""
    network = network_of(name)
    tokens = torch.randint(0, VOCAB, (3, 32), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(3, 32, dtype=torch.bool)
    mask[0, :7] = not padded
    logits, caches = [], []
    for _ in range(2):
        cache = KeyValueCache(network.config)
        with torch.no_grad():
            for start, end in ((0, 20), (20, 30), (30, 31), (31, 32)):
                seen = mask[:, start:end] if padded else None
                hidden = network.hidden_states(tokens[:, start:end], seen, cache=cache)
                cache.advance()
                logits.append(network.compute_logits(hidden)[mask[:, start:end]])
        caches.append(cache)
        assert accelerate(network)
    for found, expected in zip(logits[4:], logits[:4], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(caches[1].stores, caches[0].stores, strict=True):
        torch.testing.assert_close(ours.key[0, :, 8:32], theirs.key[0, :, 8:32], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(ours.value[1, :, :32], theirs.value[1, :, :32], atol=2e-4, rtol=1e-4)


def test_prompts_of_every_length():
    network = network_of("llama-3.1-8b")
    tokens = torch.randint(0, VOCAB, (1, 70))
    with torch.no_grad():
        expected = network.hidden_states(tokens)
        accelerate(network)
        for length in range(1, 71):
            found = network.hidden_states(tokens[:, :length], cache=KeyValueCache(network.config))
            torch.testing.assert_close(found, expected[:, :length], atol=2e-4, rtol=1e-4)


def test_windows_slide_in_the_kernels_too():
    network = network_of("mistral-7b")
    accelerate(network)
    _, cache = logits_of(network, torch.randint(0, VOCAB, (1, 30)))
    assert isinstance(cache.stores[0], SlidingStore)


@pytest.mark.parametrize("name", ["marian", "bart-base", "transformer-base"])
def test_an_encoder_decoder_steps_too(name):
    network = network_of(name)
    source = torch.randint(0, VOCAB, (3, 7))
    source_mask = torch.ones(3, 7, dtype=torch.bool)
    source_mask[1, 4:] = False
    tokens = torch.randint(0, VOCAB, (3, 9))
    with torch.no_grad():
        encoder_output = network.precompute_cross_attention(network.encode(source, source_mask))
    expected, _ = logits_of(network, tokens, encoder_output=encoder_output, prompt=1)
    assert accelerate(network), unsupported_network_reason(network, "cpu")
    found, _ = logits_of(network, tokens, encoder_output=encoder_output, prompt=1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_packed_weights_step_as_they_read(bits):
    """Against the same packed weights as numbers: only the rounding of x to eight bits differs."""
    network = pack_network(network_of("llama-3.1-8b"), bits)
    for prompt in (5, 20):
        tokens = torch.randint(0, VOCAB, (2, prompt + 7))
        with torch.enable_grad():  # then the modules use the numbers
            numbers = network(tokens)[:, prompt - 1 :]
        accelerate(network)
        found, _ = logits_of(network, tokens, prompt=prompt)
        assert (found - numbers).norm() / numbers.norm() < 0.05


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
def test_half_precision_keeps_its_cache_in_half(bits):
    network = network_of("llama-3.1-8b", torch.bfloat16)
    if bits:
        pack_network(network, bits)
    tokens = torch.randint(0, VOCAB, (2, 10))
    expected, _ = logits_of(network, tokens)
    accelerate(network)
    found, cache = logits_of(network, tokens)
    assert cache.stores[0].key.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < 0.05


def test_a_mistake_in_the_cache_would_show():
    """The control: with one key changed the two differ."""
    network = network_of("llama-3.1-8b")
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


def test_two_caches_and_a_selection_do_not_mix():
    network = network_of("llama-3.1-8b")
    accelerate(network)
    tokens = torch.randint(0, VOCAB, (2, 8))
    expected, _ = logits_of(network, tokens)
    with torch.no_grad():
        first, second = KeyValueCache(network.config), KeyValueCache(network.config)
        for cache, rows in ((first, tokens), (second, tokens.flip(0))):
            network.hidden_states(rows[:, :6], cache=cache)
            cache.advance()
        for step in (6, 7):
            logits = []
            for cache, rows in ((first, tokens), (second, tokens.flip(0))):
                logits.append(
                    network.compute_logits(network.hidden_states(rows[:, step : step + 1], cache=cache)[:, -1])
                )
                cache.advance()
            first, second = first.select(torch.tensor([0, 1])), second.select(torch.tensor([0, 1]))
    torch.testing.assert_close(logits[0], expected[:, -1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1].flip(0), expected[:, -1], atol=1e-4, rtol=1e-4)


def test_moving_the_network_makes_a_new_plan():
    network = network_of("llama-3.1-8b")
    accelerate(network)
    tokens = torch.randint(0, VOCAB, (1, 8))
    before, _ = logits_of(network, tokens)
    with torch.no_grad():
        network.double().float()
        for parameter in network.parameters():
            parameter.mul_(1)
    after, _ = logits_of(network, tokens)
    torch.testing.assert_close(after, before)


def test_the_decode_loop_runs_unchanged():
    network = network_of("llama-3.1-8b")
    options = SamplingOptions(max_new_tokens=12)
    plain, fast = (
        [TokenSequence([1, 2, 3], options), TokenSequence([4, 5], options)],
        [TokenSequence([1, 2, 3], options), TokenSequence([4, 5], options)],
    )
    for _ in decode(network, plain):
        pass
    accelerate(network)
    assert isinstance(network.decoder, AcceleratedStack)
    for _ in decode(network, fast):
        pass
    assert [row.tokens for row in fast] == [row.tokens for row in plain]


@pytest.mark.parametrize("name", ["deepseek-v3", "t5-small", "bloom-7b1", "gopher-280b", "grok-1"])
def test_what_it_does_not_know_stays_as_it_is(name):
    network = network_of(name)
    assert unsupported_network_reason(network, "cpu")
    assert not accelerate(network)
    assert not isinstance(network.decoder, AcceleratedStack)
