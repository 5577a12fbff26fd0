"""Lowering: merged weights share memory with the modules, and hold what the modules compute with."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from clearhead.backends.lowering import lower_block, lower_head, rotation_table
from clearhead.backends.lowering_norms import lower_norm
from clearhead.backends.lowering_projections import merge_weights
from clearhead.backends.modules import pack_network
from clearhead.model.positions import make_rotation
from tests.backends.networks import toy_network


@pytest.mark.parametrize("bits", [None, "int8"])
def test_merging_twice_copies_once(bits):
    network = toy_network("llama-3.2-1b")
    if bits is not None:
        pack_network(network, bits)
    attention = network.decoder.layers[0].attention
    first, second = (merge_weights((attention.query, attention.key, attention.value)) for _ in range(2))
    first, second = (first, second) if bits is None else (first.quants, second.quants)
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2", "gemma-3-1b", "bart-base"])
@torch.no_grad()
def test_a_lowered_block_computes_the_projections_of_its_modules(name):
    block = toy_network(name).decoder.layers[0]
    x = torch.randn(3, block.attention.query.in_features, generator=torch.Generator().manual_seed(0))
    attention, feed_forward = block.attention, block.feed_forward
    expected = torch.cat([projection(x) for projection in (attention.query, attention.key, attention.value)], dim=-1)
    expected_inner = torch.cat([part(x) for part in (feed_forward.gate, feed_forward.up) if part is not None], dim=-1)
    lowered = lower_block(block)
    for projection, value in ((lowered.query_key_value, expected), (lowered.dense.gate_and_up, expected_inner)):
        torch.testing.assert_close(functional.linear(x, projection.weight, projection.bias), value)
    assert lowered.dense.gated == (feed_forward.gate is not None)
    assert (lowered.cross_attention is not None) == (name == "bart-base")


@torch.no_grad()
def test_norms_are_described_by_their_parameters():
    assert lower_norm(None) is lower_norm(nn.Identity()) is None
    gemma, gpt = (lower_norm(toy_network(name).decoder.final_norm) for name in ("gemma-3-1b", "gpt2"))
    assert (gemma.kind, gemma.unit_offset, gemma.bias) == ("rms", True, None)
    assert (gpt.kind, gpt.unit_offset, gpt.bias is None) == ("layer", False, False)


def test_a_tied_head_is_the_token_table():
    network = toy_network("gpt2")
    assert lower_head(network).weight.data_ptr() == network.decoder.embedding.tokens.weight.data_ptr()
    untied = toy_network("llama-3.1-8b")
    assert lower_head(untied).weight.data_ptr() == untied.head.weight.data_ptr()


def test_a_rotation_table_holds_the_rotations_of_all_positions():
    config = toy_network("llama-3.1-8b").config.decoder.layers[0].attention
    cosine, sine = rotation_table(config, 7)
    expected = make_rotation(config.position, torch.arange(7)[None], config.head_width, torch.float32)
    assert torch.equal(cosine, expected.cosine[0, 0])
    assert torch.equal(sine, expected.sine[0, 0])
