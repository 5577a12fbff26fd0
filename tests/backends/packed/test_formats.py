"""Packed formats: the error of rounding, GGUF blocks without a change, and weights that cannot be packed."""

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.backends.packed.fitting import fit_offset
from clearhead.backends.packed.formats import pack, pack_gguf_blocks, pack_quants
from clearhead.errors import ClearheadError


def random_weight(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "error", "share"), [("int8", 0.006, 0.53), ("int4", 0.075, 1.1)])
def test_rounding_errors_are_a_share_of_a_level(bits, error, share):
    """With 16 levels, the ends of a group may be half a level outside of the grid, which is finer for it."""
    weight = random_weight(40, 160)
    packed = pack(weight, bits)
    assert packed.shape == weight.shape
    assert (packed.unpack() - weight).norm() / weight.norm() < error
    level = packed.scales.float().abs().repeat_interleave(32, 1)[:, :160]
    assert ((packed.unpack() - weight).abs() <= level * share).all()


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


def test_8_bits_are_rounded_like_ggml():
    """Scales and quants are equal except for ties, because the two divide in another order."""
    weight = random_weight(16, 128, seed=2)
    theirs = packed_by_ggml(weight, "Q8_0")
    ours = pack(weight, "int8")
    torch.testing.assert_close(ours.scales, theirs.scales, atol=0, rtol=1e-3)
    assert (ours.integers() == theirs.integers()).float().mean() > 0.98


def packed_by_ggml(weight, block_type):
    """Quantize with the gguf package."""
    blocks = torch.from_numpy(quants.quantize(weight.numpy(), GGMLQuantizationType[block_type]))
    return pack_gguf_blocks(blocks.view(weight.numel() // 32, -1), len(weight), block_type)


def weighted_errors(packed, weight):
    """Return the errors of all groups with the weights of the fit, (N, K / 32)."""
    groups = weight.unflatten(-1, (-1, 32))
    weights = (groups.square().mean(-1, keepdim=True) + groups.square()).sqrt()
    return (weights * (packed.unpack().unflatten(-1, (-1, 32)) - groups).square()).sum(-1)


@pytest.mark.parametrize("shift", [0.0, 5.0, -0.3])
@pytest.mark.parametrize("distribution", ["normal", "uniform", "heavy"])
def test_4_bits_lose_less_than_blocks_of_ggml_with_the_same_bits(distribution, shift):
    """Q4_1 spreads its levels over the range of a group; the wide search of the GGUF writer is hardly better."""
    weight = random_weight(64, 256, seed=3)
    weight = {"normal": weight, "uniform": weight.erf(), "heavy": weight**3}[distribution] + shift
    packed = pack(weight, "int4")
    ours, theirs = weighted_errors(packed, weight), weighted_errors(packed_by_ggml(weight, "Q4_1"), weight)
    assert ours.sum() < 0.92 * theirs.sum()
    assert (ours <= 1.1 * theirs + 1e-6).float().mean() > 0.98
    groups = weight.unflatten(-1, (-1, 32))
    grid = fit_offset(groups, (groups.square().mean(-1, keepdim=True) + groups.square()).sqrt(), 15)
    integers = ((groups - grid.offsets) / grid.scales).round().clamp(0, 15).to(torch.uint8)
    searched = pack_quants(integers.flatten(-2), grid.scales[..., 0].half(), grid.offsets[..., 0].half())
    assert ours.sum() < 1.08 * weighted_errors(searched, weight).sum()


def test_groups_of_equal_values_are_reproduced():
    weight = torch.tensor([0.0, 0.5, -3.0, 1024.0])[:, None].expand(4, 96)
    assert torch.equal(pack(weight, "int4").unpack(), weight)


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
