"""Memory by formula against caches, networks and allocations that exist."""

from dataclasses import replace

import pytest
import torch

from clearhead.architecture.branches import Experts
from clearhead.backends.packed.formats import pack
from clearhead.cache.cache import KeyValueCache
from clearhead.cache.paged import PagedCache, PageStorage
from clearhead.cache.pages import PagePool
from clearhead.costs.formulas.memory import (
    cache_bytes,
    cache_bytes_per_token,
    cross_cache_bytes,
    footprint,
    largest,
    largest_batch,
    largest_context,
    paged_cache_bytes,
)
from clearhead.costs.formulas.operations import operations
from clearhead.costs.formulas.parameters import parameters
from clearhead.costs.report import cost, table_rows
from clearhead.costs.simulation.counter import Counter
from clearhead.costs.simulation.layout import lay_out
from clearhead.costs.simulation.workload_steps import build, prepare, some_tokens
from clearhead.families import preset
from clearhead.training.tensor_parallel import Part, divide
from tests.costs.cases import CASES
from tests.costs.test_operations import workload_of
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
            memory = network.precompute_cross_attention(network.encode(some_tokens(network, 2, 7)))
            assert memory.num_bytes == cross_cache_bytes(workload)
        network.hidden_states(some_tokens(network, 2, length), memory=memory, cache=cache)
    cache.advance()
    assert cache.num_bytes == cache_bytes(workload)


@pytest.mark.parametrize("length", [4, 9])
def test_paged_cache_bytes(length):
    workload = workload_of(decoder(), "decode", length)
    network, pool = build(workload, "cpu"), PagePool(num_pages=32, page_size=4)
    tokens = some_tokens(network, 2, length)
    cache = PagedCache(PageStorage(pool), [pool.start(row) for row in tokens.tolist()])
    with torch.no_grad():
        network.hidden_states(tokens, cache=cache)
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


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-scout", "grok-1", "qwen3-30b-a3b"])
def test_memory_of_a_mixture_in_training(name):
    """Of enough tokens for every expert to be visited."""
    workload = workload_of(CASES[name], "train", 64, batch=4)
    network = build(workload, "cpu")
    with Counter() as real:
        prepare(network, workload)()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    assert footprint(workload).peak == pytest.approx(3 * weights + real.peak_bytes, rel=2e-3)


@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b", "llama-3.1-8b", "transformer-base", "bart-base"])
def test_gpus_that_share_heads_are_those_of_training(name):
    """The network as `clearhead train` divides it, one part under the counter: its weights, its FLOPs, its memory."""
    workload = workload_of(CASES[name], "train", 24, gpus=2, parallel="tp")
    network = build(workload, "cpu")
    divide(network, Part(0, 2, lambda x: x))
    with Counter() as real:
        prepare(network, workload)()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    found = footprint(workload)
    assert found.weights == weights
    assert found.peak == pytest.approx(3 * weights + real.peak_bytes, rel=0.03)
    assert sum(row.flops for row in rows_of(workload)) == real.flops


def rows_of(workload):
    return table_rows(operations(workload.of_one_gpu), workload)


def test_what_all_heads_and_experts_read_is_whole_on_every_gpu():
    """Latents, their projections and norms, routers (DeepSeek-V3 in vLLM: ReplicatedLinear for all of these)."""
    config = CASES["deepseek-v3"]
    alone, shared = (workload_of(config, "decode", 24, gpus=gpus, parallel="tp") for gpus in (1, 2))
    whole, part = ({(row.stack, row.name): row for row in rows_of(one)} for one in (alone, shared))
    for place, row in whole.items():
        kept_whole = place[1] in ("query down", "latent", "router", "head")
        assert part[place].flops == (row.flops if kept_whole else row.flops // 2), place
    assert footprint(shared).cache == footprint(alone).cache
    latent = config.decoder.layers[0].attention
    both = latent.query_rank + latent.latent_rank
    kept = len(config.decoder.layers) * (config.width * (both + latent.rotary_width) + both)
    assert kept < parameters(shared.of_one_gpu.config)["attention"] < kept + parameters(config)["attention"] / 2


def test_fewer_key_value_heads_than_gpus_are_on_several():
    config = CASES["llama-3.1-8b"]
    heads = config.decoder.layers[0].attention
    assert (heads.num_heads, heads.num_kv_heads) == (4, 2)
    alone, shared = (footprint(workload_of(config, "decode", 24, gpus=gpus, parallel="tp")) for gpus in (1, 4))
    assert shared.cache == alone.cache // 2
    report = cost(config, phase="decode", context=16, gpus=4, parallel="tp")
    assert report.cache_bytes_per_token * 16 == report.memory.cache


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


@pytest.mark.parametrize("fits", [1, 700, 1024, 1025, 100_000])
def test_what_fits_where_buffers_grow_in_jumps(fits):
    """Between two jumps the line through the last two sizes points anywhere."""
    tried = []

    def peak(size):
        tried.append(size)
        return 1000 * 2 ** (size - 1).bit_length() + size

    found = largest(peak, 5, peak(fits))
    assert peak(found) <= peak(fits)
    assert found >= 0.99 * fits
    assert len(tried) < 40


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
