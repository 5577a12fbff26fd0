"""Packed tokens in the CPU kernels: equal to the modules; and the same bits alone, among others and in pieces."""

from dataclasses import replace

import pytest
import torch

from clearhead.architecture import Chunked, HeadNorm, Rope, SlidingWindow
from clearhead.backends.cpu.plan import Plan
from clearhead.backends.cpu.stack import accelerate
from clearhead.backends.modules import pack_network
from clearhead.cache import KeyValueCache, PackedCache, PackedLayout, PagePool, PageStorage, forward_hidden
from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.model import Transformer
from tests.backends.networks import toy_network
from tests.backends.packed_sequences import PackedSequences, random_texts, run_mixed, same_bits
from tests.model.toys import NORM, decoder, redraw
from tests.toy_presets import shrink

PRESETS = ["llama-3.1-8b", "mistral-7b", "qwen3-8b", "gemma-3-1b", "gpt1", "smollm3-3b", "gpt-neo-125m"]
PATTERNS = {
    "window": {"pattern": SlidingWindow(size=21), "position": Rope()},
    "chunk": {"pattern": Chunked(size=19), "position": Rope()},
    "wide heads": {"head_width": 64, "position": Rope()},
    "odd heads": {"head_width": 7},
    "one key-value head": {"num_kv_heads": 1, "head_width": 32, "position": Rope()},
    "normed heads": {"head_norm": HeadNorm(norm=NORM), "position": Rope()},
}
LONG = 300  # more tokens than a few spans of the attention kernel have slots

pytestmark = pytest.mark.usefixtures("kernels")


def network_for(name, dtype=torch.float32, bits=None):
    """Return a toy network whose positions suffice for LONG tokens."""
    config = decoder(**PATTERNS[name]) if name in PATTERNS else shrink(preset(name))
    embedding, layers = config.decoder.embedding, config.decoder.layers
    if hasattr(embedding.positions, "num_positions"):
        embedding = replace(embedding, positions=replace(embedding.positions, num_positions=LONG))
    network = Transformer(replace(config, decoder=replace(config.decoder, embedding=embedding, layers=layers)))
    redraw(network)
    network = network.to(dtype).eval()
    return pack_network(network, bits) if bits else network


@pytest.mark.parametrize("name", [*PRESETS, *PATTERNS])
@pytest.mark.parametrize("page_size", [16, 48])
def test_packed_tokens_give_the_hidden_states_and_pages_of_the_modules(name, page_size, monkeypatch):
    network = network_for(name)
    expected = run_mixed(network, page_size=page_size)
    calls, run = [], Plan.run_packed
    monkeypatch.setattr(Plan, "run_packed", lambda plan, *inputs: calls.append(plan) or run(plan, *inputs))
    assert accelerate(network)
    found = run_mixed(network, page_size=page_size)
    assert len(calls) == 7
    for ours, theirs in zip(found.results(), expected.results(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=2e-4)
    for layer, pages in expected.storage.layers.items():
        for ours, theirs in zip(found.storage.layers[layer], pages, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=2e-4)


@pytest.mark.parametrize("bits", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_of_weights_differ_from_the_modules_by_rounding_only(bits, dtype):
    network = network_for("llama-3.1-8b", dtype, bits)
    expected = torch.cat(run_mixed(network).results()).float()
    accelerate(network)
    found = run_mixed(network)
    assert found.storage.layers[0][0].dtype == dtype
    assert (torch.cat(found.results()) - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("name", "bits", "threads"),
    [
        *(("llama-3.1-8b", bits, 1) for bits in (None, "bfloat16", "int8", "int4")),
        *(("wide heads", bits, 2) for bits in (None, "bfloat16", "int8", "int4")),
        *((name, None, 1) for name in ("gemma-3-1b", "gpt2", "window", "chunk")),
        ("window", "bfloat16", 3),
    ],
)
def test_the_bits_of_a_token_depend_on_its_sequence_alone(name, bits, threads):
    """Every sequence alone, token by token; whole; in pieces; and among others in two orders."""
    dtype = torch.float32 if bits is None else torch.bfloat16
    network = network_for(name, dtype, bits if bits in ("int8", "int4") else None)
    assert accelerate(network)
    lengths = (80, 20, 34)
    texts, before = random_texts(lengths), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = []
        for text in texts:
            sequence = PackedSequences(network, [text])
            for _ in text:
                sequence.step({0: 1})
            alone += sequence.results()
        torch.set_num_threads(2 if threads == 1 else 1)
        runs = [PackedSequences(network, texts, page_size) for page_size in (16, 32, 16)]
        runs[0].step(dict(enumerate(lengths)))
        for counts in ({2: 3, 0: 68}, {2: 1, 0: 1, 1: 9}, {1: 1, 0: 2, 2: 30}, {0: 9, 1: 10}):
            runs[1].step(counts)
        for _ in range(20):
            runs[2].step({1: 1, 2: 1, 0: 1})
        runs[2].step({0: 60, 2: 14})
    finally:
        torch.set_num_threads(before)
    for run in runs:
        for expected, found in zip(alone, run.results(), strict=True):
            assert same_bits(found, expected)


def test_the_bits_of_logits_do_not_depend_on_the_number_of_rows():
    for bits in (None, "int8", "int4"):
        network = network_for("llama-3.1-8b", torch.bfloat16, bits)
        accelerate(network)
        hidden = torch.randn(130, network.config.width)
        with torch.no_grad():
            alone = torch.cat([network.compute_logits(row[None]) for row in hidden])
            for start, end in ((0, 3), (5, 12), (20, 40), (0, 130)):
                assert same_bits(network.compute_logits(hidden[start:end]), alone[start:end])


def test_a_changed_key_in_a_page_changes_the_hidden_states():
    """A control: the comparisons above would detect a wrong page."""
    network = network_for("llama-3.1-8b")
    accelerate(network)
    results = []
    for change in (0, 1):
        sequences = PackedSequences(network, random_texts((40, 40)))
        sequences.step({0: 39, 1: 39})
        sequences.storage.layers[0][0][sequences.tables[0].pages[1], :, 3] += change
        sequences.step({0: 1, 1: 1})
        results.append(sequences.results())
    assert (results[0][0][-1] - results[1][0][-1]).abs().max() > 1e-3
    assert same_bits(results[0][1], results[1][1])


def test_values_outside_of_a_sequence_are_never_read():
    """Pages may hold anything after the last token of a sequence, and before its window."""
    network = network_for("window")
    accelerate(network)
    results = []
    for filled in (0.0, float("nan")):
        sequences = PackedSequences(network, random_texts((60,)))
        for tensors in sequences.storage.layers.values():
            for tensor in tensors:
                tensor.fill_(filled)
        sequences.step({0: 57})
        for tensors in sequences.storage.layers.values():
            for tensor in tensors:
                tensor[sequences.tables[0].pages[0]] = filled  # outside of the window of the next tokens
        for _ in range(3):
            sequences.step({0: 1})
        results += sequences.results()
    assert same_bits(*results)


def test_pages_of_other_sizes_run_in_the_modules(monkeypatch):
    network = network_for("llama-3.1-8b")
    accelerate(network)
    monkeypatch.setattr(Plan, "run_packed", lambda *inputs: pytest.fail("the kernels were called"))
    sequences = PackedSequences(network, random_texts((10,)), page_size=12)
    sequences.step({0: 10})


def test_pages_of_another_dtype_are_an_error():
    network = network_for("llama-3.1-8b")
    accelerate(network)
    sequences = PackedSequences(network, random_texts((10,)))
    sequences.storage.layers = {n: (k.bfloat16(), v.bfloat16()) for n, (k, v) in sequences.storage.layers.items()}
    with pytest.raises(ClearheadError, match="for_stack"):
        sequences.step({0: 10})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slots", [999999], "in no page"),
        ("page_tables", [[-1]], "does not exist"),
        ("lengths", [2], "not the last"),
        ("positions", [20], "not the last"),
        ("sequence_starts", [0, 2], "do not cover"),
    ],
)
def test_a_layout_that_points_outside_of_the_pages_is_refused(field, value, message):
    network, storage = network_for("llama-3.1-8b"), PageStorage(PagePool(4, 16))
    accelerate(network)
    fields = {"positions": [0], "slots": [16], "sequence_starts": [0, 1], "lengths": [1], "page_tables": [[1]]}
    tensors = {
        name: torch.tensor(numbers).to(torch.int64 if name in ("positions", "slots") else torch.int32)
        for name, numbers in (fields | {field: value}).items()
    }
    with torch.no_grad(), pytest.raises(AssertionError, match=message):
        network.hidden_states(torch.tensor([[1]]), cache=PackedCache(storage, PackedLayout(**tensors)))


def test_a_changed_weight_is_noticed_when_a_prompt_begins():
    network = toy_network("llama-3.1-8b")
    accelerate(network)
    sequences = PackedSequences(network, random_texts((20, 20)))
    sequences.step({0: 20})
    with torch.no_grad():
        network.decoder.layers[0].feed_forward.up.weight.mul_(2)
    sequences.texts[1] = sequences.texts[0]
    sequences.step({1: 20})
    assert not same_bits(*sequences.results())


@pytest.mark.parametrize(
    ("name", "bits"),
    [("wide heads", None), ("wide heads", "bfloat16"), ("wide heads", "int4"), ("odd heads", None), ("gpt2", "int8")],
)
def test_a_contiguous_cache_gives_the_bits_of_pages(name, bits, monkeypatch):
    """Texts in rows of one cache, read in pieces and then token by token, as the decode loop does."""
    network = network_for(name, torch.float32 if bits is None else torch.bfloat16, bits if bits != "bfloat16" else None)
    assert accelerate(network)
    texts = random_texts((85, 85))
    pages = PackedSequences(network, texts)
    pages.step({0: 85, 1: 85})
    calls, run = [], Plan.run_rows
    monkeypatch.setattr(Plan, "run_rows", lambda plan, *inputs: calls.append(run(plan, *inputs)) or calls[-1])
    cache, tokens = KeyValueCache(network.config), torch.tensor(texts)
    with torch.no_grad():
        parts = [forward_hidden(network, part, cache) for part in tokens.split([37, 30, *[1] * 18], dim=1)]
    assert calls == [True] * 20
    for found, expected in zip(torch.cat(parts, dim=1), pages.results(), strict=True):
        assert same_bits(found, expected)
