"""The CUDA graph against the plain loop, on a GPU; what it refuses, anywhere."""

from dataclasses import replace

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.fast.cuda import GraphDecoder, why_not
from clearhead.fast.modules import pack_network
from clearhead.fast.support import merge
from clearhead.generation import graph
from clearhead.generation.decode import Row, decode
from clearhead.generation.graph import decode_in_graph, fits
from clearhead.generation.options import SamplingOptions
from clearhead.model.transformer import Transformer
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, redraw

gpu = pytest.mark.gpu


def network_of(name, device="cpu", **changes):
    torch.manual_seed(0)
    network = Transformer(with_attention(shrink(preset(name)), **changes))
    redraw(network)
    return network.to(device).eval()


def with_attention(config, **changes):
    layers = [replace(layer, attention=replace(layer.attention, **changes)) for layer in config.output_stack.layers]
    return replace(config, decoder=replace(config.decoder, layers=tuple(layers))) if changes else config


def run(loop, network, prompts, options):
    rows = [Row(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    for _ in loop(network, rows):
        pass
    return [row.tokens for row in rows]


@gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_graph_makes_the_tokens_of_the_loop(num_rows, temperature):
    network = network_of("llama-3.2-1b", "cuda", head_width=16)
    prompts = [[number % VOCAB for number in range(1 + row, 9 + 2 * row)] for row in range(num_rows)]
    options = [
        SamplingOptions(max_new_tokens=20 + row, temperature=temperature, top_p=0.95, seed=row)
        for row in range(num_rows)
    ]
    assert fits(network, [Row(prompt, option) for prompt, option in zip(prompts, options, strict=True)])
    assert run(decode_in_graph, network, prompts, options) == run(decode, network, prompts, options)


@gpu
@pytest.mark.parametrize("num_rows", [1, 3, 20])  # by_kernels, by_kernels, by_products
@pytest.mark.parametrize("bits", ["int8", "int4"])
@torch.no_grad()
def test_packed_weights_give_the_logits_of_the_network(bits, num_rows):
    """But for x, which the kernels round to eight bits."""
    network = pack_network(network_of("llama-3.2-1b", "cuda", head_width=16), bits)
    prompts = [[row, 1, 2, 3] for row in range(num_rows)]
    seen = []
    decoder = GraphDecoder(network, num_rows, 16, lambda logits, steps: (seen.append(logits), logits.argmax(-1))[1])
    decoder.token.copy_(decoder.read(prompts).argmax(-1))
    following = [[*prompt, token] for prompt, token in zip(prompts, decoder.token.tolist(), strict=True)]
    decoder.advance()
    expected = network(torch.tensor(following, device="cuda"))[:, -1]
    error = (seen[-1] - expected).norm() / expected.norm()
    assert error < (0.04 if num_rows <= decoder.most_rows else 1e-4)  # PyTorch's products round nothing
    step = seen[-1]
    decoder.start(decoder.read(prompts).argmax(-1))  # the same step, captured
    assert decoder.next().tolist() == step.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["deepseek-v3", "mistral-7b", "qwen3-8b", "t5-small", "gpt2", "bloom-7b1"])
def test_other_models_are_left_to_the_loop(name):
    network = network_of(name)
    assert why_not(network)
    with pytest.raises(ClearheadError, match="does not run in a CUDA graph"):
        GraphDecoder(network, 1, 16, lambda logits, steps: logits.argmax(-1))


def test_without_a_gpu_the_loop_is_used():
    assert not fits(network_of("llama-3.2-1b", head_width=16), [Row([1], SamplingOptions())])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"head_width": 16, "num_heads": 32, "num_kv_heads": 1}, "more than 16 query heads"),
        ({"head_width": 12}, "no power of two"),
    ],
)
def test_heads_beyond_a_tile_are_left_to_the_loop(change, sentence):
    assert sentence in why_not(network_of("llama-3.2-1b", **change))


def test_altered_networks_are_left_to_the_loop():
    assert "float64" in why_not(network_of("llama-3.2-1b", head_width=16).double())
    mixed = network_of("llama-3.2-1b", head_width=16)
    mixed.decoder.layers[1].bfloat16()
    assert "several precisions" in why_not(mixed)
    hooked = network_of("llama-3.2-1b", head_width=16)
    hooked.decoder.final_norm.register_forward_hook(lambda *given: None)
    assert "hooked into" in why_not(hooked)
    assert why_not(pack_network(network_of("llama-3.2-1b", head_width=16), "int8")) is None
    network = network_of("llama-3.2-1b", head_width=16)
    network.decoder.layers[0].register_forward_hook(lambda *given: None)
    assert "hooked into" in why_not(network)


def test_a_row_that_is_done_has_room_until_the_last_one_is(monkeypatch):
    """A long prompt with one token beside a short one with many: both take as many steps."""
    asked = []

    def refuse(network, batch, capacity, choose):
        asked.append(capacity)
        raise ClearheadError("no GPU here")

    monkeypatch.setattr(graph, "GraphDecoder", refuse)
    rows = [Row([1] * 50, SamplingOptions(max_new_tokens=1)), Row([1], SamplingOptions(max_new_tokens=40))]
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(network_of("llama-3.2-1b", head_width=16), rows))
    assert asked == [50 + 40 + 2]


class Counting:
    """In the place of the graph: row r says 10 r, 10 r + 1, …"""

    asked = 0

    def __init__(self, network, batch, capacity, choose):
        self.step = torch.zeros(batch, dtype=torch.long)

    def read(self, prompts):
        return torch.eye(VOCAB)[[10 * row for row in range(len(prompts))]]

    def start(self, tokens):
        self.token = tokens.clone()

    def next(self):
        Counting.asked += 1
        self.token += 1
        return self.token


class Copied:
    """In the place of a mailbox: what stood in the buffer when it was posted."""

    def __init__(self, tokens):
        self.tokens = tokens.tolist()

    def read(self):
        return self.tokens


def test_two_tokens_are_in_flight(monkeypatch):
    monkeypatch.setattr(graph, "GraphDecoder", Counting)
    monkeypatch.setattr(graph, "Mailbox", Copied)
    rows = [Row([1, 2], SamplingOptions(max_new_tokens=4)), Row([3], SamplingOptions(max_new_tokens=2))]
    for number, _ in enumerate(decode_in_graph(network_of("llama-3.2-1b", head_width=16), rows)):
        assert Counting.asked == number + 2
    assert [row.tokens for row in rows] == [[0, 1, 2, 3], [10, 11]]


@pytest.mark.parametrize("bits", [None, "int8"])
def test_matrices_are_merged_once(bits):
    network = network_of("llama-3.2-1b", head_width=16)
    if bits is not None:
        pack_network(network, bits)
    attention = network.decoder.layers[0].attention
    first, second = (merge((attention.query, attention.key, attention.value)) for _ in range(2))
    first, second = (first, second) if bits is None else (first.quants, second.quants)
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second)
