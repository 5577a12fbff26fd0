"""Modules with packed weights: casting and copying, experts against the plain mixture, and packing in place."""

import weakref
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

import clearhead
from clearhead.architecture import Experts, FeedForward, Router
from clearhead.backends import modules
from clearhead.backends.modules import EXPERT_WEIGHTS, PackedMatrix, PackedMixture, pack_network
from clearhead.backends.packed import pack
from clearhead.backends.sensitivity import pack_parameter
from clearhead.model import MixtureLayer, RouterLayer, Transformer
from tests.backends.networks import logits_of, toy_network
from tests.model.test_mixture import CASES
from tests.model.toys import redraw

MIXTURES = ["qwen3-30b-a3b", "deepseek-v2", "deepseek-v3", "llama-4-scout", "llama-4-maverick", "grok-1", "grok-2"]
TOKENS = torch.arange(40).view(2, 20) * 7 % 11


# --- casting and moving


def test_casting_a_network_does_not_change_packed_weights():
    network = pack_network(toy_network("llama-3.1-8b"), "int4")
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.bfloat16().half().double().float()
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_failed_move_does_not_change_packed_weights():
    network = pack_network(toy_network("llama-3.1-8b"), "int4")
    tokens = torch.arange(20)[None] % 9
    expected = network(tokens)

    def run_out_of_memory(tensor):
        if tensor.dtype in (torch.uint8, torch.int8):
            raise torch.OutOfMemoryError("no memory for the quants")
        return tensor

    for part in network.modules():
        if isinstance(part, PackedMatrix):
            with pytest.raises(torch.OutOfMemoryError):
                part._apply(run_out_of_memory)
    torch.testing.assert_close(network(tokens), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt2"])
def test_packed_networks_compute_in_other_dtypes(name, dtype):
    """Absorbed latent attention is included, because it reads the weight itself."""
    network = pack_network(toy_network(name), "int8")
    tokens = torch.arange(20)[None] % 9
    with torch.no_grad():
        expected = network(tokens, absorb=True)
        found = network.to(dtype)(tokens, absorb=True)
    assert found.dtype == dtype
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.1  # over tokens: if two experts score about equally, the router may choose the other


# --- experts


@torch.no_grad()
def rounded(network, bits):
    """Give a plain network the weights that packing would round it to."""
    routers = {id(module.weight) for module in network.modules() if isinstance(module, RouterLayer)}
    for name, weight in network.named_parameters():
        if weight.ndim > 1 and id(weight) not in routers and "positions" not in name:
            packed = pack_parameter(network.config, name, weight, bits)
            weight.copy_(packed.unpack(weight.dtype).view_as(weight))
    return network


def pack_experts(layer, bits):
    packed = PackedMixture(layer)
    for name in EXPERT_WEIGHTS:
        weight = getattr(layer, name)
        if weight is not None:
            packed.set_packed(name, pack(weight.detach(), bits), weight.dtype)
    return packed


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_compute_the_same_as_rounded_ones(name, bits):
    network = toy_network(name)
    expected = rounded(deepcopy(network), bits)(TOKENS)
    pack_network(network, bits)
    assert not any(type(module) is MixtureLayer for module in network.modules())
    torch.testing.assert_close(network(TOKENS), expected, atol=1e-5, rtol=1e-5)  # gradients are on: no kernels


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_packed_experts_in_the_kernels_are_close_to_rounded_ones(name, bits):
    network = toy_network(name)
    expected, _ = logits_of(rounded(deepcopy(network), bits), TOKENS)
    found, _ = logits_of(pack_network(network, bits), TOKENS)
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.1  # over tokens: if two experts score about equally, the router may choose the other


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("bits", "error"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_every_kind_of_packed_mixture_is_close_to_the_full_one(name, num_tokens, bits, error):
    """Few and many tokens use different kernels."""
    plain = MixtureLayer(CASES[name], 96)
    redraw(plain)
    packed = pack_experts(plain, bits)
    x = torch.randn(2, num_tokens, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = plain(x), packed(x)
    assert (found - expected).norm() / expected.norm() < error


@pytest.mark.parametrize(("bits", "bits_per_weight"), [("int8", 8.5), ("int4", 5.0)])
def test_packed_experts_take_the_bytes_of_their_format(bits, bits_per_weight):
    expert = FeedForward(width=64, activation="silu", gated=True)
    plain = MixtureLayer(Experts(num_experts=6, num_chosen=2, expert=expert, router=Router(score="softmax")), 128)
    redraw(plain)
    packed = pack_experts(plain, bits)
    for name in EXPERT_WEIGHTS:
        assert getattr(packed, name).packed.num_bytes == 6 * 64 * 128 * bits_per_weight / 8


def test_the_representation_of_a_model_counts_packed_experts():
    network = toy_network("deepseek-v3")
    before = repr(clearhead.Model(network)).split("float32")[0]
    assert repr(clearhead.Model(pack_network(network, "int4"))).startswith(before)


@torch.no_grad()
def test_packed_experts_can_be_copied_cast_and_loaded_from_a_state_dict():
    network = pack_network(toy_network("qwen3-30b-a3b"), "int4")
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


@torch.no_grad()
def test_the_routing_of_packed_experts_can_be_traced():
    network = pack_network(toy_network("deepseek-v3"), "int8")
    routing = clearhead.Model(network).trace([1, 2, 3, 4]).routing(-1)
    assert routing.experts.shape == (4, network.config.decoder.layers[-1].feed_forward.num_chosen)


# --- packing in place


def test_packing_frees_each_module_before_it_packs_the_next(monkeypatch):
    network = toy_network("qwen3-30b-a3b")
    plain = [weakref.ref(module) for module in network.modules() if isinstance(module, nn.Linear | MixtureLayer)]
    num_alive = []

    def count_and_pack(*arguments):
        num_alive.append(sum(module() is not None for module in plain))
        return pack_parameter(*arguments)

    monkeypatch.setattr(modules, "pack_parameter", count_and_pack)
    pack_network(network, "int4")
    assert num_alive[0] == len(plain)
    assert all(later in (earlier, earlier - 1) for earlier, later in pairwise(num_alive))
    assert num_alive[-1] == 0


def test_packing_twice_is_refused():
    network = pack_network(toy_network("gpt2"), "int8")
    with pytest.raises(clearhead.ClearheadError, match="already packed"):
        pack_network(network, "int4")
