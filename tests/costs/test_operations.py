"""FLOPs by formula against what PyTorch runs, for every family and phase, and against published numbers."""

from dataclasses import replace

import pytest
import torch

from clearhead.architecture import Bidirectional, Causal, Chunked, Dropout, ScoreTemperature, SlidingWindow
from clearhead.costs.estimate import cost
from clearhead.costs.formulas.attention import allowed_pairs, self_attention_size
from clearhead.costs.formulas.operations import expected_experts, operation_costs
from clearhead.costs.simulation.counter import KernelCounter
from clearhead.costs.simulation.peak_memory import estimate_memory
from clearhead.costs.simulation.workload_steps import build_network, prepare_step
from clearhead.families import preset
from clearhead.model.masks import AttentionIndices, pattern_mask
from tests.costs.cases import CASES, make_workload
from tests.model.toys import decoder


def run_and_count(workload, network=None):
    torch.manual_seed(0)
    step = prepare_step(network or build_network(workload, "cpu"), workload)
    with KernelCounter() as counter:
        step()
    return counter


def is_unfused(config, phase):
    """Where no fused kernel runs, the counter cannot see which pairs a mask allows."""
    layers = [layer for stack in (config.encoder, config.decoder) if stack for layer in stack.layers]
    attentions = [layer.attention for layer in layers]
    special = any(
        getattr(one, "softcap", None) or isinstance(getattr(one, "temperature", None), ScoreTemperature)
        for one in attentions
    )
    latent = any(hasattr(one, "latent_rank") for one in attentions)
    other_values = any(getattr(one, "value_width", None) for one in attentions)
    learned = any(type(one.position).__name__ in ("RelativeBuckets", "RelativeSinusoid") for one in attentions)
    return special or latent or other_values or (phase == "train" and (learned or config.dropout.attention > 0))


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
@pytest.mark.parametrize("name", CASES)
def test_flops_equal_those_counted(name, phase):
    config = CASES[name]
    if phase == "decode" and config.decoder is None:
        pytest.skip("an encoder does not decode")
    network = build_network(make_workload(config, phase, 1), "cpu")
    for context in (1, 9, 24):
        workload = make_workload(config, phase, context)
        operations, counter = operation_costs(workload), run_and_count(workload, network)
        assert sum(operation.flops for operation in operations) == counter.flops > 0, context
        if not is_unfused(config, phase):
            allowed = sum(operation.allowed_flops for operation in operations)
            assert allowed == counter.allowed_flops, context


@pytest.mark.parametrize("name", ["llama-3.1-8b", "t5-small"])
def test_recomputation_runs_every_block_again_and_saves_less(name):
    """Through torch.utils.checkpoint around the blocks of a real network."""
    stored, recomputed = (make_workload(CASES[name], "train", 24, recompute=recompute) for recompute in (False, True))
    operations, counter = operation_costs(recomputed), run_and_count(recomputed)
    assert sum(operation.flops for operation in operations) == counter.flops
    assert counter.saved_bytes < 0.5 * run_and_count(stored).saved_bytes
    assert estimate_memory(recomputed).activations == pytest.approx(counter.saved_bytes, rel=0.03)


@pytest.mark.parametrize("pattern", [Causal(), SlidingWindow(size=4), Chunked(size=5), Bidirectional()])
@pytest.mark.parametrize(("start", "length"), [(0, 13), (12, 1), (3, 7)])
def test_allowed_pairs_equal_those_of_the_mask(pattern, start, length):
    indices = AttentionIndices(torch.arange(start, start + length)[None], torch.arange(start + length)[None])
    assert allowed_pairs(pattern, start, length) == int(pattern_mask(pattern, indices).sum())


def test_a_sliding_cache_passes_all_its_slots_to_the_kernel():
    """A window of 3 with the slack of a cache, 16: nineteen keys, of which the mask allows three."""
    config = decoder(pattern=SlidingWindow(size=3))
    size = self_attention_size(config.decoder.layers[0], make_workload(config, "decode", 10), 1, is_decoder=True)
    assert (size.num_keys, size.num_allowed_pairs) == (19, 3)


def test_expected_number_of_different_experts():
    assert expected_experts(8, 2, 1) == 2
    assert expected_experts(256, 8, 100_000) == 256
    assert expected_experts(4, 1, 2) == 2  # 4 · (1 - 0.75²) = 1.75


def test_flops_of_a_llama_token_are_twice_its_matrix_weights():
    """2N plus attention: Kaplan et al. 2020, equation 2.2."""
    report = cost(preset("llama-3.1-8b"), phase="decode", context=1)
    assert report.flops == 2 * 7_504_658_432 + 32 * 4 * 32 * 128
    assert report.model_flops.matrix_parameters == 8_030_261_248 - 128_256 * 4096 - 65 * 4096


def test_model_flops_by_both_conventions():
    """GPT-2 at 1,024 by hand: 6N + 12·L·D·T, and with (T + 1) / 2 keys per query instead of T."""
    flops = cost(preset("gpt2"), phase="train", batch=2, context=1024).model_flops
    matrices = 12 * 12 * 768 * 768 + 50257 * 768
    assert flops.matrix_parameters == matrices
    assert flops.palm_flops_per_token == 6 * matrices + 12 * 12 * 768 * 1024
    assert flops.causal_flops_per_token == 6 * matrices + 12 * 12 * 768 * 1025 // 2


def book_table(phase, batch, context, layers):
    """Return FLOPs, bytes with a fused kernel, and elements without it, of one layer of GPT-2 by operation."""
    report = cost(preset("gpt2"), phase=phase, batch=batch, context=context)
    return {
        operation.name: (
            operation.flops // layers,
            operation.num_bytes // (2 * layers),
            (operation.num_bytes + operation.fused_score_bytes) // (2 * layers),
        )
        for operation in report.operations
    }


def test_table_f2_of_the_book():
    """For b sequences of n tokens, width d, m heads, d_ff = 4d. A fused kernel does not move the term bmn²."""
    b, n, d, m = 3, 100, 768, 12
    table = book_table("prefill", b, n, layers=12)
    assert table["query, key, value"] == (6 * b * n * d * d, *[3 * d * d + 4 * b * n * d] * 2)
    for name in ("scores", "weighted sum"):
        assert table[name] == (2 * b * n * n * d, 2 * b * n * d, 2 * b * n * d + b * m * n * n)
    assert table["output"] == (2 * b * n * d * d, *[d * d + 2 * b * n * d] * 2)
    assert table["feed-forward"] == (16 * b * n * d * d, *[8 * d * d + 10 * b * n * d] * 2)


def test_table_f3_of_the_book():
    """The same for one token with a cache of n tokens: the scores are the term bmn."""
    b, n, d, m = 3, 100, 768, 12
    table = book_table("decode", b, n, layers=12)
    assert table["query, key, value"] == (6 * b * d * d, *[3 * d * d + 4 * b * d] * 2)
    for name in ("scores", "weighted sum"):
        assert table[name] == (2 * b * n * d, b * n * d + b * d, b * n * d + b * d + b * m * n)
    assert table["output"] == (2 * b * d * d, *[d * d + 2 * b * d] * 2)
    assert table["feed-forward"] == (16 * b * d * d, *[8 * d * d + 10 * b * d] * 2)


def test_an_unfused_kernel_moves_the_scores():
    """In training with attention dropout the CPU has no fused kernel, so the term bmn² is part of the bytes."""
    configs = [replace(preset("gpt2"), dropout=dropout) for dropout in (Dropout(), Dropout(attention=0.1))]
    fused, unfused = (
        {one.name: one for one in operation_costs(make_workload(config, "train", 24))} for config in configs
    )
    for name in ("scores", "weighted sum"):
        assert "[+ B·N·T·S]" in fused[name].traffic
        assert unfused[name].traffic.endswith(" + B·N·T·S")
        assert unfused[name].fused_score_bytes == 0
        assert unfused[name].num_bytes == fused[name].num_bytes + fused[name].fused_score_bytes
