"""The CUDA graph against the plain loop, on a GPU; what it refuses, anywhere."""

from dataclasses import replace

import pytest
import torch

from clearhead.errors import ClearheadError
from clearhead.families import preset
from clearhead.fast.cuda import GraphDecoder, Matrix, why_not
from clearhead.fast.modules import pack_network
from clearhead.generation import graph
from clearhead.generation.decode import Row, decode
from clearhead.generation.graph import decode_in_graph, fits
from clearhead.generation.options import SamplingOptions
from clearhead.model.transformer import Transformer
from tests.book.shrink import shrink
from tests.model.toys import VOCAB, redraw

gpu = pytest.mark.gpu


def network_of(name, device="cpu"):
    torch.manual_seed(0)
    network = Transformer(shrink(preset(name)))
    redraw(network)
    return network.to(device).eval()


def run(loop, network, prompts, options):
    rows = [Row(prompt, option) for prompt, option in zip(prompts, options, strict=True)]
    for _ in loop(network, rows):
        pass
    return [row.tokens for row in rows]


@gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_graph_makes_the_tokens_of_the_loop(num_rows, temperature):
    network = network_of("llama-3.2-1b", "cuda")
    prompts = [[number % VOCAB for number in range(1 + row, 9 + 2 * row)] for row in range(num_rows)]
    options = [
        SamplingOptions(max_new_tokens=20 + row, temperature=temperature, top_p=0.95, seed=row)
        for row in range(num_rows)
    ]
    assert fits(network, [Row(prompt, option) for prompt, option in zip(prompts, options, strict=True)])
    assert run(decode_in_graph, network, prompts, options) == run(decode, network, prompts, options)


@gpu
def test_eight_bits_stay_near():
    network = network_of("llama-3.2-1b", "cuda")
    decoder = GraphDecoder(network, 1, 64, lambda logits, steps: logits.argmax(-1), "int8")
    decoder.read([[1, 2, 3, 4]])
    full = GraphDecoder(network, 1, 64, lambda logits, steps: logits.argmax(-1))
    full.read([[1, 2, 3, 4]])
    x = torch.randn(1, network.config.width, device="cuda")
    found, expected = decoder.to_logits(x), full.to_logits(x)
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("name", ["deepseek-v3", "mistral-7b", "qwen3-8b", "t5-small", "gpt2", "bloom-7b1"])
def test_other_models_are_left_to_the_loop(name):
    network = network_of(name)
    assert why_not(network)
    with pytest.raises(ClearheadError, match="does not run in a CUDA graph"):
        GraphDecoder(network, 1, 16, lambda logits, steps: logits.argmax(-1))


def test_without_a_gpu_the_loop_is_used():
    assert not fits(network_of("llama-3.2-1b"), [Row([1], SamplingOptions())])


def test_rows_of_eight_bits():
    weight = torch.randn(6, 40)
    packed = Matrix.of(weight, None, "int8")
    assert packed.values.dtype == torch.int8
    assert (packed.unpacked(torch.float32) - weight).abs().max() <= packed.scales.max() * 0.51


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_heads": 32, "num_kv_heads": 1}, "more than 16 query heads"),
        ({"head_width": 12}, "no power of two"),
    ],
)
def test_heads_beyond_a_tile_are_left_to_the_loop(change, sentence):
    config = shrink(preset("llama-3.2-1b"))
    layers = [replace(layer, attention=replace(layer.attention, **change)) for layer in config.decoder.layers]
    assert sentence in why_not(Transformer(replace(config, decoder=replace(config.decoder, layers=tuple(layers)))))


def test_altered_networks_are_left_to_the_loop():
    assert why_not(network_of("llama-3.2-1b").double()) == "float64"
    assert why_not(pack_network(network_of("llama-3.2-1b"), "int8")) == "packed weights"
    network = network_of("llama-3.2-1b")
    network.decoder.layers[0].register_forward_hook(lambda *given: None)
    assert "hooked into" in why_not(network)


def test_a_row_that_is_done_has_room_until_the_last_one_is(monkeypatch):
    """A long prompt with one token beside a short one with many: both take as many steps."""
    asked = []

    def refuse(network, batch, capacity, choose, bits):
        asked.append(capacity)
        raise ClearheadError("no GPU here")

    monkeypatch.setattr(graph, "GraphDecoder", refuse)
    rows = [Row([1] * 50, SamplingOptions(max_new_tokens=1)), Row([1], SamplingOptions(max_new_tokens=40))]
    with pytest.raises(ClearheadError, match="no GPU here"):
        next(decode_in_graph(network_of("llama-3.2-1b"), rows))
    assert asked == [50 + 40 + 2]
