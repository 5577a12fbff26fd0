"""Packed experts against the plain mixture with the same rounded numbers, for every family that has experts."""

import weakref
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

import clearhead
from clearhead.architecture import Experts, FeedForward, Router
from clearhead.backends import modules
from clearhead.backends.modules import EXPERT_WEIGHTS, PackedMixture, pack_network
from clearhead.backends.packed.formats import pack
from clearhead.model.mixture import MixtureLayer, RouterLayer
from clearhead.model.transformer import Transformer
from tests.backends.cpu.test_stack import logits_of, network_of
from tests.model.test_mixture import CASES
from tests.model.toys import redraw

MIXTURES = ["qwen3-30b-a3b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "llama-4-maverick", "grok-1", "grok-2"]
TOKENS = torch.arange(40).view(2, 20) * 7 % 11


@torch.no_grad()
def rounded(network, bits):
    """The plain network, whose matrices hold the numbers that packed ones stand for."""
    kept = {id(module.weight) for module in network.modules() if isinstance(module, RouterLayer)}
    for name, weight in network.named_parameters():
        if weight.ndim > 1 and id(weight) not in kept and "positions" not in name:
            weight.copy_(pack(weight, bits).unpack(weight.dtype).view_as(weight))
    return network


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_are_the_rounded_ones(name, bits):
    network = network_of(name)
    expected = rounded(deepcopy(network), bits)(TOKENS)
    pack_network(network, bits)
    assert not any(type(module) is MixtureLayer for module in network.modules())
    torch.testing.assert_close(network(TOKENS), expected, atol=1e-5, rtol=1e-5)  # with gradients: no kernels


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_in_kernels_too(name, bits):
    network = network_of(name)
    expected, _ = logits_of(rounded(deepcopy(network), bits), TOKENS)
    found, _ = logits_of(pack_network(network, bits), TOKENS)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.1  # of the tokens: where two experts are about equal a router may take the other


def packed_experts(layer, bits):
    packed = PackedMixture(layer)
    for name in EXPERT_WEIGHTS:
        weight = getattr(layer, name)
        if weight is not None:
            packed.set_packed(name, pack(weight.detach(), bits), weight.dtype)
    return packed


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("bits", "error"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_every_kind_of_mixture_stays_near_the_full_one(name, num_tokens, bits, error):
    """Few rows and many, which other kernels take."""
    plain = MixtureLayer(CASES[name], 96)
    redraw(plain)
    packed = packed_experts(plain, bits)
    x = torch.randn(2, num_tokens, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = plain(x), packed(x)
    assert (found - expected).norm() / expected.norm() < error


@pytest.mark.parametrize(("bits", "bits_per_weight"), [("int8", 8.5), ("int4", 5.0)])
def test_experts_take_the_bytes_of_the_format(bits, bits_per_weight):
    expert = FeedForward(width=64, activation="silu", gated=True)
    plain = MixtureLayer(Experts(num_experts=6, num_chosen=2, expert=expert, router=Router(score="softmax")), 128)
    redraw(plain)
    packed = packed_experts(plain, bits)
    for name in ("gate", "up", "down"):
        assert getattr(packed, name).packed.num_bytes == 6 * 64 * 128 * bits_per_weight / 8


def test_a_model_counts_its_packed_experts():
    network = network_of("deepseek-v3")
    before = repr(clearhead.Model(network)).split("float32")[0]
    assert repr(clearhead.Model(pack_network(network, "int4"))).startswith(before)


@torch.no_grad()
def test_packed_experts_copy_move_and_load():
    network = pack_network(network_of("qwen3-30b-a3b"), "int4")
    expected = network(TOKENS)
    copy = deepcopy(network)
    assert torch.equal(copy(TOKENS), expected)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    assert state["decoder.layers.0.feed_forward.up.quants"].dtype == torch.uint8
    other = pack_network(Transformer(network.config).eval(), "int4")
    other.load_state_dict(state)
    assert torch.equal(other(TOKENS), expected)
    copy.bfloat16().double().float()
    for name, buffer in copy.named_buffers():
        assert torch.equal(buffer, state[name]), name
    assert copy.to(torch.bfloat16)(TOKENS).dtype == torch.bfloat16


def test_packing_holds_no_module_that_it_has_exchanged(monkeypatch):
    network = network_of("qwen3-30b-a3b")
    plain = [weakref.ref(module) for module in network.modules() if isinstance(module, nn.Linear | MixtureLayer)]
    alive = []

    def counted(weight, bits):
        alive.append(sum(module() is not None for module in plain))
        return pack(weight, bits)

    monkeypatch.setattr(modules, "pack", counted)
    pack_network(network, "int4")
    assert alive[0] == len(plain)
    assert all(later in (earlier, earlier - 1) for earlier, later in pairwise(alive))
    assert alive[-1] == 0


@torch.no_grad()
def test_their_routing_is_traced():
    network = pack_network(network_of("deepseek-v3"), "int8")
    routing = clearhead.Model(network).trace([1, 2, 3, 4]).router(5)
    assert routing.experts.shape == (4, network.config.decoder.layers[5].feed_forward.num_chosen)
