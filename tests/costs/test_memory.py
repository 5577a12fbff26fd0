"""Memory by formula and by simulation against real caches, networks and allocations."""

import math
from dataclasses import replace

import pytest
import torch

from clearhead.architecture import Experts
from clearhead.backends import PackedMatrix, pack, pack_network
from clearhead.cache import KeyValueCache, PagedCache, PagePool, PageStorage
from clearhead.costs.estimate import cost
from clearhead.costs.formulas.memory import (
    cache_bytes,
    cache_bytes_per_token,
    cross_cache_bytes,
    paged_cache_bytes,
)
from clearhead.costs.formulas.operations import list_operations, operation_costs
from clearhead.costs.formulas.parameters import parameters_by_part
from clearhead.costs.simulation.counter import KernelCounter
from clearhead.costs.simulation.meta_run import simulate
from clearhead.costs.simulation.peak_memory import (
    estimate_memory,
    largest_batch,
    largest_context,
    largest_that_fits,
)
from clearhead.costs.simulation.workload_steps import build_network, dummy_tokens, prepare_step
from clearhead.families import preset
from clearhead.model import Transformer
from clearhead.parallel import TensorParallelRank, shard_network
from tests.costs.cases import CASES, make_workload
from tests.model.toys import decoder

DECODERS = [name for name, config in CASES.items() if config.decoder is not None]
DENSE = [
    name
    for name, config in CASES.items()
    if not any(isinstance(layer.feed_forward, Experts) for layer in config.output_stack.layers)
]


def weight_bytes_of(network):
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())


# --- caches


def draw_source(network):
    """Return a source of 7 positions: tokens, or mel bands for an encoder that reads audio."""
    if network.config.reads_audio:
        return torch.zeros(2, network.config.encoder.embedding.num_mel_bands, 14)
    return dummy_tokens(network, 2, 7)


@pytest.mark.parametrize("length", [1, 18, 30])
@pytest.mark.parametrize("name", DECODERS)
def test_cache_bytes_equal_those_of_the_cache(name, length):
    """Contiguous, sliding and latent, before and after the window is full; and cross-attention keys and values."""
    workload = make_workload(CASES[name], "decode", length)
    network, cache, encoder_output = build_network(workload, "cpu"), KeyValueCache(CASES[name]), None
    with torch.no_grad():
        if workload.config.is_encoder_decoder:
            encoder_output = network.precompute_cross_attention(network.encode(draw_source(network)))
            assert encoder_output.num_bytes == cross_cache_bytes(workload)
        network.hidden_states(dummy_tokens(network, 2, length), encoder_output=encoder_output, cache=cache)
    cache.advance()
    assert cache.num_bytes == cache_bytes(workload)


@pytest.mark.parametrize("length", [4, 9])
def test_paged_cache_bytes_equal_those_of_the_cache(length):
    workload = make_workload(decoder(), "decode", length)
    network, pool = build_network(workload, "cpu"), PagePool(num_pages=32, page_size=4)
    tokens = dummy_tokens(network, 2, length)
    cache = PagedCache(PageStorage(pool), [pool.create_table(row) for row in tokens.tolist()])
    with torch.no_grad():
        network.hidden_states(tokens, cache=cache)
    assert cache.num_bytes == paged_cache_bytes(workload, page_size=4)


def test_cache_bytes_per_token_equal_published_ones():
    """DeepSeek-V2 (2024), §2.1: (512 + 64) · 61 layers; Llama 3.1: 2 · 8 heads · 128 · 32 layers; 2 bytes each."""
    assert cache_bytes_per_token(preset("llama-3.1-8b"), 2) == 131_072
    assert cache_bytes_per_token(preset("deepseek-v3"), 2) == 70_272


def test_a_long_context_allocates_nothing():
    """Not even positions: 10¹² of them would take 8 TB."""
    workload = make_workload(preset("llama-3.1-8b"), "decode", 10**12, batch=1)
    assert cache_bytes(workload) == 10**12 * cache_bytes_per_token(workload.config, workload.bytes_per_activation)
    assert list_operations(workload)


# --- simulated runs


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
@pytest.mark.parametrize("name", DENSE)
def test_a_simulated_run_equals_the_real_one(name, phase):
    """On the meta device as on the CPU: the same FLOPs, nearly the same kernels, bytes and memory."""
    if phase == "decode" and CASES[name].decoder is None:
        pytest.skip("an encoder does not decode")
    workload = make_workload(CASES[name], phase, 24)
    simulated = simulate(workload)
    network = build_network(workload, "cpu")
    with KernelCounter() as real:
        step = prepare_step(network, workload)
        real.restart()
        step()
    assert simulated.flops == real.flops
    assert simulated.num_dispatches == pytest.approx(real.num_dispatches, rel=0.03)
    assert simulated.num_bytes == pytest.approx(real.num_bytes, rel=0.03)
    assert simulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    weights = weight_bytes_of(network)
    moments = 2 * weights if phase == "train" else 0
    assert estimate_memory(workload).peak == pytest.approx(weights + moments + real.peak_bytes, rel=0.02)


@pytest.mark.parametrize("phase", ["train", "decode"])
@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-scout", "grok-1"])
def test_a_simulated_mixture_runs_the_flops_of_the_formulas(name, phase):
    workload = make_workload(CASES[name], phase, 24)
    expected = sum(operation.flops for operation in operation_costs(workload))
    assert simulate(workload).flops == expected
    if phase == "train":
        assert simulate(workload, max_experts=2).flops == expected


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-scout", "grok-1"])
def test_two_simulated_experts_have_the_peak_memory_of_all(name, phase):
    workload = make_workload(CASES[name], phase, 24)
    assert simulate(workload, max_experts=2).peak_bytes == simulate(workload).peak_bytes


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-scout", "grok-1", "qwen3-30b-a3b"])
def test_peak_memory_of_training_a_mixture_equals_the_real_one(name):
    """With enough tokens for every expert to be selected."""
    workload = make_workload(CASES[name], "train", 64, batch=4)
    network = build_network(workload, "cpu")
    with KernelCounter() as real:
        prepare_step(network, workload)()
    expected = 3 * weight_bytes_of(network) + real.peak_bytes
    assert estimate_memory(workload).peak == pytest.approx(expected, rel=2e-3)


# --- several GPUs


@pytest.mark.parametrize("name", ["gpt2", "qwen3-0.6b", "llama-3.1-8b", "transformer-base", "bart-base"])
def test_tensor_parallel_costs_equal_those_of_a_sharded_network(name):
    """The network as `clearhead train` shards it, one rank under the counter: its weights, FLOPs and memory."""
    workload = make_workload(CASES[name], "train", 24, gpus=2, parallel="tp")
    network = build_network(workload, "cpu")
    shard_network(network, TensorParallelRank(0, 2, lambda x: x, ""))
    with KernelCounter() as real:
        prepare_step(network, workload)()
    weights = weight_bytes_of(network)
    memory = estimate_memory(workload)
    assert memory.weights == weights
    assert memory.peak == pytest.approx(3 * weights + real.peak_bytes, rel=0.03)
    assert sum(operation.flops for operation in operation_costs(workload)) == real.flops


def test_tensor_parallel_gpus_replicate_what_all_heads_and_experts_read():
    """Latents, their projections and norms, routers (DeepSeek-V3 in vLLM: ReplicatedLinear for all of these)."""
    config = CASES["deepseek-v3"]
    alone, sharded = (make_workload(config, "decode", 24, gpus=gpus, parallel="tp") for gpus in (1, 2))
    whole, part = (
        {(operation.stack, operation.name): operation for operation in operation_costs(workload)}
        for workload in (alone, sharded)
    )
    for key, operation in whole.items():
        is_replicated = key[1] in ("query down", "latent", "router", "head")
        assert part[key].flops == (operation.flops if is_replicated else operation.flops // 2), key
    assert estimate_memory(sharded).cache == estimate_memory(alone).cache
    latent = config.decoder.layers[0].attention
    ranks = latent.query_rank + latent.latent_rank
    replicated = len(config.decoder.layers) * (config.width * (ranks + latent.rotary_width) + ranks)
    num_sharded = parameters_by_part(sharded.per_gpu.config)["attention"]
    assert replicated < num_sharded < replicated + parameters_by_part(config)["attention"] / 2


def test_tensor_parallel_gpus_share_key_value_heads_if_there_are_fewer():
    config = CASES["llama-3.1-8b"]
    attention = config.decoder.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads) == (4, 2)
    alone, sharded = (estimate_memory(make_workload(config, "decode", 24, gpus=gpus, parallel="tp")) for gpus in (1, 4))
    assert sharded.cache == alone.cache // 2
    report = cost(config, phase="decode", context=16, gpus=4, parallel="tp")
    assert report.cache_bytes_per_token * 16 == report.memory.cache


def test_fsdp_divides_weights_and_ddp_does_not():
    alone = estimate_memory(make_workload(decoder(), "train", 8, batch=4))
    ddp = estimate_memory(make_workload(decoder(), "train", 8, batch=4, gpus=4))
    fsdp = estimate_memory(make_workload(decoder(), "train", 8, batch=4, gpus=4, parallel="fsdp"))
    assert ddp.weights == alone.weights == 4 * fsdp.weights
    assert ddp.activations < alone.activations / 3
    assert fsdp.peak < ddp.peak < alone.peak


# --- what fits


@pytest.mark.parametrize("phase", ["train", "decode"])
def test_the_largest_batch_and_context_fit_and_larger_ones_do_not(phase):
    workload = make_workload(CASES["llama-3.1-8b"], phase, 24)
    memory = 4 * estimate_memory(workload).peak
    batch = largest_batch(workload, memory)
    assert estimate_memory(make_workload(workload.config, phase, 24, batch=batch)).peak <= memory
    assert estimate_memory(make_workload(workload.config, phase, 24, batch=batch + 1 + batch // 50)).peak > memory
    context = largest_context(workload, memory)
    assert estimate_memory(make_workload(workload.config, phase, context)).peak <= memory
    assert estimate_memory(make_workload(workload.config, phase, context + 1 + context // 50)).peak > memory


@pytest.mark.parametrize("fits", [1, 700, 1024, 1025, 100_000])
def test_largest_that_fits_finds_it_if_buffers_grow_in_jumps(fits):
    """Between two jumps, the line through the last two sizes points anywhere."""
    tried = []

    def peak(size):
        tried.append(size)
        return 1000 * 2 ** (size - 1).bit_length() + size

    largest = largest_that_fits(peak, 5, peak(fits))
    assert peak(largest) <= peak(fits)
    assert largest >= 0.99 * fits
    assert len(tried) < 40


def test_the_largest_source_of_an_encoder_decoder_fits_and_a_larger_one_does_not():
    workload = replace(make_workload(CASES["t5-small"], "prefill", 5), source=24)
    assert workload.num_tokens == 2 * 24
    memory = 4 * estimate_memory(workload).peak
    source = largest_context(workload, memory)
    assert estimate_memory(replace(workload, source=source)).peak <= memory
    assert estimate_memory(replace(workload, source=source + 1 + source // 50)).peak > memory


def test_the_largest_size_is_zero_if_nothing_fits_and_at_most_the_learned_positions():
    assert largest_batch(make_workload(decoder(), "train", 8), 1000) == 0
    assert largest_context(make_workload(CASES["gpt2"], "prefill", 8), 1e9) == 32


def test_bytes_of_quantized_weights_equal_those_of_their_blocks():
    """GGUF's blocks of 32: 18, 20 and 34 bytes; int8 as it is packed."""
    plain = estimate_memory(make_workload(decoder(), "decode", 8)).weights
    block_bytes = {"q4_0": 18, "q4_1": 20, "q8_0": 34, "int8": pack(torch.randn(1, 64), "int8").num_bytes // 2}
    for weights_format, size in block_bytes.items():
        weights = estimate_memory(make_workload(decoder(), "decode", 8, weights=weights_format)).weights
        assert weights == pytest.approx(plain / 4 / 32 * size, abs=1)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("smollm2-135m", {"width": 192}),
        ("llama-3.1-8b", {"width": 192}),
        ("llama-3.1-8b", {"width": 2048}),
        ("marian", {"width": 192}),
    ],
)
def test_bytes_of_int4_weights_are_those_of_a_packed_network(name, sizes):
    """Sensitive matrices keep 8 bits: in a wide network those of some layers only."""
    torch.manual_seed(0)
    config = resized(preset(name), num_layers=4, **sizes)
    network = pack_network(Transformer(config), "int4")
    packed = [part.packed for part in network.modules() if isinstance(part, PackedMatrix)]
    num_weights, num_bytes = sum(math.prod(each.shape) for each in packed), sum(each.num_bytes for each in packed)
    workload = replace(make_workload(config, "decode", 8, weights="int4"), device_type="cpu")
    assert workload.bytes_per_weight == pytest.approx(
        num_bytes / num_weights, rel=0.002
    )  # norms and biases are left out


def resized(config, width, num_layers):
    """Return the config with this width and number of layers, inner widths of 128 and 512 tokens."""
    changes = {"width": width}
    for name in ("encoder", "decoder"):
        stack = getattr(config, name)
        if stack is not None:
            layer = stack.layers[0]
            layer = replace(layer, feed_forward=replace(layer.feed_forward, width=128))
            embedding = replace(stack.embedding, vocab_size=512)
            changes[name] = replace(stack, layers=(layer,) * num_layers, embedding=embedding)
    return replace(config, **changes)
