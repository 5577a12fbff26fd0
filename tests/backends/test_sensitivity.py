"""The matrices that keep 8 bits when a network is packed in 4: which they are, and that fewer predictions change."""

from copy import deepcopy

import pytest
import torch
from gguf import GGMLQuantizationType, quants

import clearhead
from clearhead.backends.modules import is_packable, pack_network
from clearhead.backends.packed import pack
from clearhead.backends.sensitivity import choose_bits, gets_more_bits, is_sensitive
from clearhead.model import Transformer
from tests.backends.networks import toy_network
from tests.model.toys import redraw
from tests.toy_presets import shrink


def sensitive_names(network, device_type="cpu"):
    """Return the names of the packable parameters that keep 8 bits."""
    names = [name for name, _ in network.named_parameters() if is_packable(network, name)]
    return [name for name in names if is_sensitive(network.config, name, device_type)]


def test_tables_values_and_down_projections_of_a_narrow_network_are_sensitive():
    network = toy_network("llama-3.1-8b")
    layers = range(len(network.decoder.layers))
    assert sensitive_names(network) == [
        "decoder.embedding.tokens.weight",
        *(f"decoder.layers.{n}.{part}.weight" for n in layers for part in ("attention.value", "feed_forward.down")),
        "head.weight",
    ]


def test_experts_shared_experts_and_cross_attention_are_included():
    names = sensitive_names(toy_network("deepseek-v3"))
    assert any(name.endswith("feed_forward.down") for name in names)
    assert any(name.endswith("feed_forward.shared.down.weight") for name in names)
    names = sensitive_names(toy_network("marian"))
    assert any("encoder.layers.0.attention.value" in name for name in names)
    assert any("decoder.layers.0.cross_attention.value" in name for name in names)


def test_values_stay_in_the_format_of_queries_and_keys_on_a_gpu():
    network = toy_network("llama-3.1-8b")
    assert not any(".value." in name for name in sensitive_names(network, "cuda"))
    assert sum(".down." in name for name in sensitive_names(network, "cuda")) == len(network.decoder.layers)


def test_some_layers_of_a_wide_network_are_sensitive():
    config = clearhead.preset("llama-3.1-8b")  # 32 layers
    layers = [n for n in range(32) if is_sensitive(config, f"decoder.layers.{n}.feed_forward.down.weight")]
    assert layers == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert layers == [n for n in range(32) if gets_more_bits(n, 32)]
    assert is_sensitive(config, "head.weight")


def test_a_matrix_from_4_bit_blocks_keeps_4_bits():
    network, name = toy_network("llama-3.1-8b"), "decoder.layers.0.feed_forward.down.weight"
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(0))
    assert choose_bits(network.config, name, weight, "int4") == "int8"
    blocks = quants.quantize(weight.numpy(), GGMLQuantizationType.Q4_1)
    rounded = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType.Q4_1))
    for stored in (rounded, rounded.bfloat16()):
        assert choose_bits(network.config, name, stored, "int4") == "int4"
        assert choose_bits(network.config, name, stored, "int8") == "int8"
    assert choose_bits(network.config, name, rounded, "int4", torch.bfloat16) == "int4"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gpt2", "gemma-3-1b"])
def test_predictions_change_less_than_in_4_bits_everywhere(name):
    torch.manual_seed(0)
    network = Transformer(shrink(clearhead.preset(name))).eval()
    redraw(network)
    everywhere = deepcopy(network)
    for parameter_name, weight in everywhere.named_parameters():
        if is_packable(everywhere, parameter_name):
            weight.copy_(pack(weight, "int4").unpack())
    tokens = torch.arange(200).view(8, 25) * 7 % 29
    before = network(tokens).log_softmax(-1)
    mixed = pack_network(network, "int4")(tokens).log_softmax(-1)
    plain = everywhere(tokens).log_softmax(-1)
    divergence, plain_divergence = ((before.exp() * (before - after)).sum(-1).mean() for after in (mixed, plain))
    assert divergence < 0.9 * plain_divergence
