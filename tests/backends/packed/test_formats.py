"""Packed weights: what rounding costs, that GGUF's own blocks are held unchanged, and that bad weights are refused."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.backends.modules import PackedMatrix, pack_network
from clearhead.backends.packed.formats import pack, pack_gguf_blocks
from clearhead.errors import ClearheadError
from tests.backends.cpu.test_stack import network_of


@pytest.mark.parametrize(("bits", "error"), [("int8", 0.006), ("int4", 0.08)])
def test_rounding_stays_within_half_a_step(bits, error):
    weight = torch.randn(40, 160, generator=torch.Generator().manual_seed(0))
    packed = pack(weight, bits)
    assert packed.shape == weight.shape
    assert (packed.unpack() - weight).norm() / weight.norm() < error
    step = packed.scales.float().abs().repeat_interleave(32, 1)[:, :160]
    assert ((packed.unpack() - weight).abs() <= step * 0.53).all()


@given(st.integers(1, 5), st.integers(1, 200), st.sampled_from(["int8", "int4"]))
@settings(max_examples=40, deadline=None)
def test_any_width_comes_back(rows, columns, bits):
    weight = torch.linspace(-1, 1, rows * columns).view(rows, columns)
    assert pack(weight, bits).unpack().shape == (rows, columns)
    assert torch.equal(pack(torch.zeros(rows, columns), bits).unpack(), torch.zeros(rows, columns))


def test_bytes_are_those_of_the_format():
    weight = torch.randn(8, 256)
    assert pack(weight, "int8").num_bytes == 8 * 256 * 8.5 / 8
    assert pack(weight, "int4").num_bytes == 8 * 256 * 5 / 8


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("columns", [64, 96])
def test_blocks_of_gguf_mean_what_the_gguf_package_says(kind, columns):
    weight = torch.randn(6, columns, generator=torch.Generator().manual_seed(1)).numpy()
    blocks = quants.quantize(weight, GGMLQuantizationType[kind])
    expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[kind]))
    packed = pack_gguf_blocks(torch.from_numpy(blocks).view(6 * columns // 32, -1), 6, kind)
    torch.testing.assert_close(packed.unpack(), expected, atol=1e-6, rtol=1e-6)
    picked = torch.tensor([5, 0])
    assert torch.equal(packed.rows(picked).unpack(), packed.unpack()[picked])


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_our_rounding_is_ggmls(kind):
    """Same scales and same steps, up to ties: the two divide in another order."""
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(2))
    theirs = pack_gguf_blocks(
        torch.from_numpy(quants.quantize(weight.numpy(), GGMLQuantizationType[kind])).view(16 * 4, -1), 16, kind
    )
    ours = pack(weight, "int4" if kind == "Q4_1" else "int8")
    torch.testing.assert_close(ours.scales, theirs.scales, atol=0, rtol=1e-3)
    assert (ours.integers() == theirs.integers()).float().mean() > 0.98


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(wrong):
    weight = torch.randn(4, 64)
    weight[1, 1] = wrong
    with pytest.raises(ClearheadError, match="damaged"):
        pack(weight, "int4")


def test_weights_beyond_half_precision_are_refused():
    with pytest.raises(ClearheadError, match="too large"):
        pack(torch.full((1, 64), 1e8), "int8")


def test_a_change_of_precision_leaves_packed_weights_as_they_are():
    network = pack_network(network_of("llama-3.1-8b"), "int4")
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    network.bfloat16().half().double().float()
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_a_move_that_fails_leaves_packed_weights_as_they_are():
    network = pack_network(network_of("llama-3.1-8b"), "int4")
    tokens = torch.arange(20)[None] % 9
    expected = network(tokens)

    def full(tensor):
        if tensor.dtype == torch.uint8:
            raise torch.OutOfMemoryError("no room for the quants")
        return tensor

    for part in network.modules():
        if isinstance(part, PackedMatrix):
            with pytest.raises(torch.OutOfMemoryError):
                part._apply(full)
    torch.testing.assert_close(network(tokens), expected, atol=0, rtol=0)


def test_large_matrices_are_packed_in_pieces(monkeypatch):
    weight = torch.randn(3, 7, 100, generator=torch.Generator().manual_seed(0))
    whole = pack(weight, "int4")
    monkeypatch.setattr("clearhead.backends.packed.formats.ELEMENTS_PER_CHUNK", 250)  # two rows
    assert torch.equal(pack(weight, "int4").unpack(), whole.unpack())
    assert whole.shape == (21, 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt2"])
def test_packed_networks_run_in_other_precisions(name, dtype):
    """Latent attention also where it is absorbed, which reads the weight itself."""
    network = pack_network(network_of(name), "int8")
    tokens = torch.arange(20)[None] % 9
    with torch.no_grad():
        expected = network(tokens, absorb=True)
        found = network.to(dtype)(tokens, absorb=True)
    assert found.dtype == dtype
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.1  # of the tokens: where two experts are about equal a router may take the other


def test_weights_from_blocks_are_met_again():
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(1)).numpy()
    blocks = torch.from_numpy(quants.quantize(weight, GGMLQuantizationType.Q4_1)).view(6 * 4, -1)
    once = pack_gguf_blocks(blocks, 6, "Q4_1").unpack()
    assert (pack(once, "int4").unpack() - once).norm() / once.norm() < 1e-3
