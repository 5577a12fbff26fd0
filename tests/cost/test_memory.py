"""Memory by formula against caches, networks and allocations that exist."""

from dataclasses import replace

import pytest
import torch

from clearhead.cache.cache import KeyValueCache
from clearhead.cache.paged import PagedCache, PageMemory
from clearhead.cache.pages import PagePool
from clearhead.cost.counter import Counter
from clearhead.cost.layout import lay_out
from clearhead.cost.memory import (
    cache_bytes,
    cache_bytes_per_token,
    cross_cache_bytes,
    footprint,
    largest,
    largest_batch,
    largest_context,
    paged_cache_bytes,
)
from clearhead.cost.operations import operations
from clearhead.cost.parameters import parameters
from clearhead.cost.report import table_rows
from clearhead.cost.running import build, prepare, some_tokens
from clearhead.families import preset
from clearhead.fast.packed import pack
from clearhead.model.branches import Experts
from tests.cost.cases import CASES
from tests.cost.test_operations import workload_of
from tests.model.toys import decoder

DECODERS = [name for name, config in CASES.items() if config.decoder is not None]
DENSE = [
    name
    for name, config in CASES.items()
    if not any(isinstance(layer.feed_forward, Experts) for layer in config.output_stack.layers)
]


@pytest.mark.parametrize("length", [1, 18, 30])
@pytest.mark.parametrize("name", DECODERS)
def test_cache_bytes(name, length):
    """Contiguous, ring and latent, before and after the ring is full; and what cross-attention remembers."""
    workload = workload_of(CASES[name], "decode", length)
    network, cache, memory = build(workload, "cpu"), KeyValueCache(CASES[name]), None
    with torch.no_grad():
        if workload.config.is_encoder_decoder:
            memory = network.remember(network.encode(some_tokens(network, 2, 7)))
            assert memory.num_bytes == cross_cache_bytes(workload)
        network.hidden(some_tokens(network, 2, length), memory=memory, cache=cache)
    cache.advance()
    assert cache.num_bytes == cache_bytes(workload)


@pytest.mark.parametrize("length", [4, 9])
def test_paged_cache_bytes(length):
    workload = workload_of(decoder(), "decode", length)
    network, pool = build(workload, "cpu"), PagePool(num_pages=32, page_size=4)
    tokens = some_tokens(network, 2, length)
    cache = PagedCache(PageMemory(pool), [pool.start(row) for row in tokens.tolist()])
    with torch.no_grad():
        network.hidden(tokens, cache=cache)
    assert cache.num_bytes == paged_cache_bytes(workload, page_size=4)


def test_published_caches():
    """DeepSeek-V2 (2024), §2.1: (512 + 64) · 61 layers; Llama 3.1: 2 · 8 heads · 128 · 32 layers; 2 bytes each."""
    assert cache_bytes_per_token(preset("llama-3.1-8b"), 2) == 131_072
    assert cache_bytes_per_token(preset("deepseek-v3"), 2) == 70_272


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
@pytest.mark.parametrize("name", DENSE)
def test_a_run_laid_out_is_the_run(name, phase):
    """On the meta device as on the CPU: the same FLOPs, nearly the same kernels, bytes and memory."""
    if phase == "decode" and CASES[name].decoder is None:
        pytest.skip("an encoder decodes nothing")
    workload = workload_of(CASES[name], phase, 24)
    laid_out = lay_out(workload)
    network = build(workload, "cpu")
    with Counter() as real:
        step = prepare(network, workload)
        real.restart()
        step()
    assert laid_out.flops == real.flops
    assert laid_out.num_dispatches == pytest.approx(real.num_dispatches, rel=0.03)
    assert laid_out.num_bytes == pytest.approx(real.num_bytes, rel=0.03)
    assert laid_out.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    moments = 2 * weights if phase == "train" else 0
    assert footprint(workload).peak == pytest.approx(weights + moments + real.peak_bytes, rel=0.02)


@pytest.mark.parametrize("phase", ["train", "decode"])
@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-scout", "grok-1"])
def test_a_mixture_laid_out_multiplies_as_much(name, phase):
    workload = workload_of(CASES[name], phase, 24)
    expected = sum(row.flops for row in table_rows(operations(workload), workload))
    assert lay_out(workload).flops == expected
    if phase == "train":
        assert lay_out(workload, experts_at_most=2).flops == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-scout", "grok-1"])
def test_a_few_experts_tell_of_the_highest_moment_of_all(name, phase):
    workload = workload_of(CASES[name], phase, 24)
    assert lay_out(workload, experts_at_most=2).peak_bytes == lay_out(workload).peak_bytes


def test_gpus_that_share_heads_have_the_rest_whole():
    """Embedding and head, and of the cache what heads have in common: fewer key-value heads than GPUs, a latent."""
    config = CASES["llama-3.1-8b"]
    alone, shared = (footprint(workload_of(config, "decode", 24, gpus=gpus, parallel="tp")) for gpus in (1, 4))
    blocks = sum(parameters(config)[part] for part in ("attention", "feed-forward")) * 4
    assert shared.weights == alone.weights - blocks + blocks // 4
    kv_heads = config.decoder.layers[0].attention.num_kv_heads
    assert shared.cache == alone.cache // min(kv_heads, 4)
    latent = [footprint(workload_of(CASES["deepseek-v3"], "decode", 24, gpus=n, parallel="tp")).cache for n in (1, 2)]
    assert latent[0] == latent[1]


def test_a_long_context_is_not_laid_out_in_numbers():
    """Nor in positions: a thousand billion of them would be 8 TB."""
    workload = workload_of(preset("llama-3.1-8b"), "decode", 10**12, batch=1)
    assert cache_bytes(workload) == 10**12 * cache_bytes_per_token(workload.config, workload.num_bytes)
    assert operations(workload)


@pytest.mark.parametrize("phase", ["train", "decode"])
def test_what_fits_fits(phase):
    workload = workload_of(CASES["llama-3.1-8b"], phase, 24)
    room = 4 * footprint(workload).peak
    rows = largest_batch(workload, room)
    assert footprint(workload_of(workload.config, phase, 24, batch=rows)).peak <= room
    assert footprint(workload_of(workload.config, phase, 24, batch=rows + 1 + rows // 50)).peak > room
    context = largest_context(workload, room)
    assert footprint(workload_of(workload.config, phase, context)).peak <= room
    assert footprint(workload_of(workload.config, phase, context + 1 + context // 50)).peak > room


def test_what_fits_where_buffers_grow_in_jumps():
    """Between two jumps the peak of one of two GPUs falls as the context grows, and every line points back."""
    workload = workload_of(CASES["t5-small"], "decode", 5, gpus=2, parallel="tp")
    peaks = [footprint(replace(workload, context=context)).peak for context in (1100, 2000, 2100)]
    assert peaks[1] < peaks[0] < peaks[2]
    tried = []

    def peak(context):
        tried.append(context)
        return footprint(replace(workload, context=context)).peak

    context = largest(peak, 5, peaks[0])
    assert footprint(replace(workload, context=context)).peak <= peaks[0]
    assert len(tried) < 30


def test_the_source_that_fits_an_encoder():
    workload = replace(workload_of(CASES["t5-small"], "prefill", 5), source=24)
    assert workload.tokens == 2 * 24
    room = 4 * footprint(workload).peak
    source = largest_context(workload, room)
    assert footprint(replace(workload, source=source)).peak <= room
    assert footprint(replace(workload, source=source + 1 + source // 50)).peak > room


def test_what_does_not_fit():
    assert largest_batch(workload_of(decoder(), "train", 8), 1000) == 0
    assert largest_context(workload_of(CASES["gpt2"], "prefill", 8), 1e9) == 32  # all it has learned


def test_weights_are_shared_as_asked():
    alone = footprint(workload_of(decoder(), "train", 8, batch=4))
    data = footprint(workload_of(decoder(), "train", 8, batch=4, gpus=4))
    shards = footprint(workload_of(decoder(), "train", 8, batch=4, gpus=4, parallel="fsdp"))
    assert data.weights == alone.weights == 4 * shards.weights
    assert data.activations < alone.activations / 3
    assert shards.peak < data.peak < alone.peak


def test_quantised_weights_are_smaller():
    """GGUF's blocks of 32: 18, 20 and 34 bytes; the others as they are packed."""
    plain = footprint(workload_of(decoder(), "decode", 8)).weights
    block_bytes = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
    block_bytes |= {bits: pack(torch.randn(1, 64), bits).num_bytes // 2 for bits in ("int8", "int4")}
    for quant, size in block_bytes.items():
        found = footprint(workload_of(decoder(), "decode", 8, quant=quant)).weights
        assert found == pytest.approx(plain / 4 / 32 * size, abs=1)
