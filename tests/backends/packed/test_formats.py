"""Packed formats: the error of rounding, GGUF blocks without a change, and weights that cannot be packed."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.backends.packed.formats import pack, pack_gguf_blocks
from clearhead.errors import ClearheadError


def random_weight(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "error"), [("int8", 0.006), ("int4", 0.08)])
def test_rounding_errors_are_at_most_half_a_level(bits, error):
    weight = random_weight(40, 160)
    packed = pack(weight, bits)
    assert packed.shape == weight.shape
    assert (packed.unpack() - weight).norm() / weight.norm() < error
    level = packed.scales.float().abs().repeat_interleave(32, 1)[:, :160]
    assert ((packed.unpack() - weight).abs() <= level * 0.53).all()


@given(st.integers(1, 5), st.integers(1, 200), st.sampled_from(["int8", "int4"]))
@settings(max_examples=40, deadline=None)
def test_matrices_of_any_width_keep_their_shape_and_zeros_stay_zero(rows, columns, bits):
    weight = torch.linspace(-1, 1, rows * columns).view(rows, columns)
    assert pack(weight, bits).unpack().shape == (rows, columns)
    assert torch.equal(pack(torch.zeros(rows, columns), bits).unpack(), torch.zeros(rows, columns))


def test_int8_takes_8_5_and_int4_5_bits_per_weight():
    weight = torch.randn(8, 256)
    assert pack(weight, "int8").num_bytes == 8 * 256 * 8.5 / 8
    assert pack(weight, "int4").num_bytes == 8 * 256 * 5 / 8


@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("columns", [64, 96])
def test_gguf_blocks_unpack_to_the_values_of_the_gguf_package(block_type, columns):
    weight = random_weight(6, columns, seed=1).numpy()
    blocks = quants.quantize(weight, GGMLQuantizationType[block_type])
    expected = torch.from_numpy(quants.dequantize(blocks, GGMLQuantizationType[block_type]))
    packed = pack_gguf_blocks(torch.from_numpy(blocks).view(6 * columns // 32, -1), 6, block_type)
    torch.testing.assert_close(packed.unpack(), expected, atol=1e-6, rtol=1e-6)
    selected = torch.tensor([5, 0])
    assert torch.equal(packed.rows(selected).unpack(), packed.unpack()[selected])


@pytest.mark.parametrize("block_type", ["Q4_1", "Q8_0"])
def test_packing_rounds_like_ggml(block_type):
    """Scales and quants are equal except for ties, because the two divide in another order."""
    weight = random_weight(16, 128, seed=2)
    blocks = torch.from_numpy(quants.quantize(weight.numpy(), GGMLQuantizationType[block_type])).view(16 * 4, -1)
    theirs = pack_gguf_blocks(blocks, 16, block_type)
    ours = pack(weight, "int4" if block_type == "Q4_1" else "int8")
    torch.testing.assert_close(ours.scales, theirs.scales, atol=0, rtol=1e-3)
    assert (ours.integers() == theirs.integers()).float().mean() > 0.98


def test_packing_weights_that_came_from_blocks_reproduces_them():
    weight = random_weight(6, 128, seed=1).numpy()
    blocks = torch.from_numpy(quants.quantize(weight, GGMLQuantizationType.Q4_1)).view(6 * 4, -1)
    once = pack_gguf_blocks(blocks, 6, "Q4_1").unpack()
    assert (pack(once, "int4").unpack() - once).norm() / once.norm() < 1e-3


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_with_nan_or_infinity_are_refused(wrong):
    weight = torch.randn(4, 64)
    weight[1, 1] = wrong
    with pytest.raises(ClearheadError, match="damaged"):
        pack(weight, "int4")


def test_weights_whose_scale_exceeds_float16_are_refused():
    with pytest.raises(ClearheadError, match="too large"):
        pack(torch.full((1, 64), 1e8), "int8")


def test_packing_in_chunks_gives_the_same_result(monkeypatch):
    weight = random_weight(3, 7, 100)
    expected = pack(weight, "int4")
    monkeypatch.setattr("clearhead.backends.packed.formats.ELEMENTS_PER_CHUNK", 250)  # two rows
    assert torch.equal(pack(weight, "int4").unpack(), expected.unpack())
    assert expected.shape == (21, 100)
