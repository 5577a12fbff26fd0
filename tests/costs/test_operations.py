"""FLOPs by formula against what PyTorch runs, for every family and phase; and formulas against published numbers."""

import pytest
import torch

from clearhead.architecture.config import ScoreTemperature
from clearhead.architecture.parts import Bidirectional, Causal, Chunked, SlidingWindow
from clearhead.costs.formulas.attention import allowed_pairs, keys_for
from clearhead.costs.formulas.memory import footprint
from clearhead.costs.formulas.operations import num_visited, operations
from clearhead.costs.formulas.workload import Workload
from clearhead.costs.report import cost, table_rows
from clearhead.costs.simulation.counter import Counter
from clearhead.costs.simulation.workload_steps import build, prepare
from clearhead.families import preset
from clearhead.model.masks import Grid, pattern_mask
from tests.costs.cases import CASES
from tests.model.toys import decoder


def workload_of(config, phase, context, **changes):
    sizes = {"batch": 2, "context": context, "source": 7, "dtype": "float32", "device_type": "cpu"}
    return Workload(config=config, phase=phase, **(sizes | changes))


def counted(workload):
    torch.manual_seed(0)
    step = prepare(build(workload, "cpu"), workload)
    with Counter() as counter:
        step()
    return counter


def spells_out_attention(config, phase):
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


@pytest.mark.parametrize("context", [1, 9, 24])
@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_counted(name, phase, context):
    config = CASES[name]
    if phase == "decode" and config.decoder is None:
        pytest.skip("an encoder decodes nothing")
    workload = workload_of(config, phase, context)
    rows, counter = table_rows(operations(workload), workload), counted(workload)
    assert sum(row.flops for row in rows) == counter.flops > 0
    if not spells_out_attention(config, phase):
        assert sum(row.allowed_flops for row in rows) == counter.allowed_flops


@pytest.mark.parametrize("name", ["llama-3.1-8b", "t5-small"])
def test_recomputation_runs_every_block_again_and_keeps_less(name):
    """Through torch.utils.checkpoint around the blocks of a real network."""
    kept, again = (workload_of(CASES[name], "train", 24, recompute=recompute) for recompute in (False, True))
    rows, counter = table_rows(operations(again), again), counted(again)
    assert sum(row.flops for row in rows) == counter.flops
    assert counter.saved_bytes < 0.5 * counted(kept).saved_bytes
    assert footprint(again).activations == pytest.approx(counter.saved_bytes, rel=0.03)


@pytest.mark.parametrize("pattern", [Causal(), SlidingWindow(size=4), Chunked(size=5), Bidirectional()])
@pytest.mark.parametrize(("start", "length"), [(0, 13), (12, 1), (3, 7)])
def test_allowed_pairs_are_those_of_the_mask(pattern, start, length):
    grid = Grid(torch.arange(start, start + length)[None], torch.arange(start + length)[None])
    assert allowed_pairs(pattern, start, length) == int(pattern_mask(pattern, grid).sum())


def test_a_ring_hands_over_all_its_slots():
    """A window of 3 with the slack of a cache, 16: nineteen keys, of which the mask allows three."""
    config = decoder(pattern=SlidingWindow(size=3))
    keys = keys_for(config.decoder.layers[0], workload_of(config, "decode", 10), 1, decodes=True)
    assert (keys.num_keys, keys.allowed_pairs) == (19, 3)


def test_experts_visited():
    assert num_visited(8, 2, 1) == 2
    assert num_visited(256, 8, 100_000) == 256
    assert num_visited(4, 1, 2) == 2  # 4 · (1 - 0.75²) = 1.75


def test_llama_of_a_token_is_twice_its_matrices():
    """2N and attention: Kaplan et al. 2020, equation 2.2."""
    report = cost(preset("llama-3.1-8b"), phase="decode", context=1)
    assert report.flops == 2 * 7_504_658_432 + 32 * 4 * 32 * 128
    assert report.utilization.matrix_parameters == 8_030_261_248 - 128_256 * 4096 - 65 * 4096


def test_both_conventions_of_utilisation():
    """GPT-2 at 1,024 by hand: 6N + 12·L·D·T, and with (T + 1) / 2 keys for each query instead of T."""
    use = cost(preset("gpt2"), phase="train", batch=2, context=1024).utilization
    matrices = 12 * 12 * 768 * 768 + 50257 * 768
    assert use.matrix_parameters == matrices
    assert use.palm_flops_per_token == 6 * matrices + 12 * 12 * 768 * 1024
    assert use.causal_flops_per_token == 6 * matrices + 12 * 12 * 768 * 1025 // 2


def test_book_table_for_one_token():
    """F3 for b rows, n tokens, width d, d_ff = 4d: 6bd², 2bnd, 2bnd, 2bd², 16bd²; numbers as in the book."""
    rows = {row.name: row for row in cost(preset("gpt2"), phase="decode", batch=3, context=100).rows}
    b, n, d, layers = 3, 100, 768, 12
    assert rows["query, key, value"].flops == layers * 6 * b * d * d
    assert rows["query, key, value"].num_bytes == layers * 2 * (3 * d * d + 4 * b * d)
    assert rows["scores"].flops == rows["weighted sum"].flops == layers * 2 * b * n * d
    assert rows["scores"].num_bytes == layers * 2 * (b * n * d + b * d)
    assert rows["output"].flops == layers * 2 * b * d * d
    assert rows["feed-forward"].flops == layers * 16 * b * d * d
    assert rows["feed-forward"].num_bytes == layers * 2 * (8 * d * d + 10 * b * d)
