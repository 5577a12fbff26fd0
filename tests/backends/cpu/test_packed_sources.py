"""Cross-attention of packed tokens in the CPU kernels: equal to the modules, and independent of other sequences."""

from dataclasses import replace

import pytest
import torch

from clearhead.backends.cpu.plan import Plan
from clearhead.backends.cpu.stack import accelerate
from clearhead.backends.modules import pack_network
from clearhead.families import preset
from clearhead.model import Transformer
from tests.backends.packed_sequences import PackedSequences, random_texts, run_mixed, same_bits
from tests.model.toys import redraw
from tests.toy_presets import shrink

PRESETS = ["transformer-base", "t5-small", "umt5-small", "bart-base", "marian", "m2m100-418m"]
LONG = 128  # more positions than any text here has
SOURCES = random_texts((70, 3, 64, 1, 17))
TEXTS = (90, 40, 17, 1, 70)

pytestmark = pytest.mark.usefixtures("kernels")


def network_for(name, dtype=torch.float32, bits=None):
    """Return a toy network with random weights whose positions suffice for all texts."""
    config = shrink(preset(name))
    network = Transformer(
        replace(config, encoder=with_positions(config.encoder), decoder=with_positions(config.decoder), context=LONG)
    )
    redraw(network)
    network = network.to(dtype).eval()
    return pack_network(network, bits) if bits else network


def with_positions(stack):
    positions = stack.embedding.positions
    if not hasattr(positions, "num_positions"):
        return stack
    return replace(stack, embedding=replace(stack.embedding, positions=replace(positions, num_positions=LONG)))


@pytest.mark.parametrize("name", PRESETS)
def test_targets_give_the_hidden_states_of_the_modules(name, monkeypatch):
    network = network_for(name)
    expected = run_mixed(network, sources=SOURCES)
    calls, run = [], Plan.run_packed
    monkeypatch.setattr(Plan, "run_packed", lambda plan, *inputs: calls.append(plan) or run(plan, *inputs))
    assert accelerate(network)
    found = run_mixed(network, sources=SOURCES)
    assert len(calls) == 7
    for ours, theirs in zip(found.results(), expected.results(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=2e-4)


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_of_weights_differ_from_the_modules_by_rounding_only(bits, dtype):
    network = network_for("bart-base", dtype, bits)
    expected = torch.cat(run_mixed(network, sources=SOURCES).results()).float()
    accelerate(network)
    found = torch.cat(run_mixed(network, sources=SOURCES).results())
    assert (found - expected).norm() / expected.norm() < 0.05


def test_a_target_depends_on_its_own_source_alone():
    """The same bits alone and among others; and a control: another source gives other hidden states."""
    network = network_for("bart-base")
    accelerate(network)
    texts = random_texts(TEXTS)
    together = PackedSequences(network, texts, sources=SOURCES)
    # The encoder runs in PyTorch, whose last bits depend on the number of rows, so keys and values are taken over.
    together.step(dict(enumerate(TEXTS)))
    for number in (0, 2, 4):
        alone = PackedSequences(network, [texts[number]], sources=[SOURCES[number]])
        take_sources(alone, together, number)
        for _ in texts[number]:
            alone.step({0: 1})
        assert same_bits(alone.results()[0], together.results()[number])
    other = PackedSequences(network, [texts[0]], sources=[SOURCES[2]])
    other.step({0: TEXTS[0]})
    assert (other.results()[0] - together.results()[0]).abs().max() > 1e-3


def take_sources(alone, together, number):
    """Copy the keys and values of one source to the pages of the sequence that runs alone."""
    pairs = zip(alone.source_tables[0].page_numbers, together.source_tables[number].page_numbers, strict=True)
    for to, source in pairs:
        for layer, tensors in alone.source_storage.layers.items():
            for tensor, other in zip(tensors, together.source_storage.layers[layer], strict=True):
                tensor[to] = other[source]


def test_values_behind_a_source_are_never_read():
    network = network_for("bart-base")
    accelerate(network)
    results = []
    for filled in (0.0, float("nan")):
        sequences = PackedSequences(network, random_texts((20,)), sources=[SOURCES[4]])
        for tensors in sequences.source_storage.layers.values():
            for tensor in tensors:
                tensor[sequences.source_tables[0].page_numbers[1], :, 1:] = filled
        sequences.step({0: 20})
        results.append(sequences.results()[0])
    assert same_bits(*results)


def test_sources_in_pages_that_do_not_exist_are_refused():
    network = network_for("bart-base")
    accelerate(network)
    sequences = PackedSequences(network, random_texts((20,)), sources=[SOURCES[4]])
    sequences.source_storage.pool.num_pages = 1
    with pytest.raises(AssertionError, match="page that does not exist"):
        sequences.step({0: 20})
