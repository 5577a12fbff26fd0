"""Our quantizers: blocks that the gguf package reads, with smaller errors than its own quantizers make."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.checkpoint.gguf_blocks import BLOCK_TYPES, dequantize
from clearhead.checkpoint.gguf_quantizers import QUANTIZED_TYPES, quantize
from clearhead.errors import ClearheadError

BY_NAME = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}


def dequantized(blocks, name, shape):
    """Return the values as the gguf package reads them; our own reader must agree."""
    theirs = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    ours = dequantize(blocks.numpy().reshape(-1, BY_NAME[name].bytes_per_block), BY_NAME[name])
    np.testing.assert_array_equal(ours.float().numpy().reshape(shape), theirs.reshape(shape))
    return torch.from_numpy(np.array(theirs.reshape(shape), dtype=np.float32))


def weights(seed=0, rows=48, columns=512):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * 0.02
    values *= torch.rand(rows, 1, generator=generator) * 4 + 0.2
    values[::7, ::31] *= 6  # outliers, as real weights have
    return values


def relative_error(values, expected):
    return float((values - expected).norm() / expected.norm())


# Measured on these weights, plus 5 %.
@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("Q8_0", 0.007),
        ("Q6_K", 0.021),
        ("Q5_1", 0.038),
        ("Q5_K", 0.041),
        ("Q5_0", 0.05),
        ("Q4_K", 0.081),
        ("Q4_0", 0.1),
    ],
)
def test_errors_are_small_and_smaller_than_those_of_plain_rounding(name, largest):
    values = weights()
    error = relative_error(dequantized(quantize(values, name), name, values.shape), values)
    assert largest / 2 < error < largest
    kind = gguf.GGMLQuantizationType[name]
    if not name.endswith("_K"):  # the gguf package has no quantizers for the K formats
        theirs = gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind)
        assert error <= 1.0001 * relative_error(torch.from_numpy(theirs), values)


def test_q8_0_is_bit_equal_to_the_gguf_package():
    values = weights(1)
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(quantize(values, "Q8_0").numpy(), theirs)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_bit_equal_to_the_gguf_package(name):
    values = weights(1)
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(quantize(values, name).numpy(), theirs.view(np.uint8).reshape(len(values), -1))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_importance_moves_the_error_to_unimportant_columns(name):
    values = weights(2)
    importance = torch.ones(values.shape[1])
    importance[::2] = 100.0
    plain, weighted = (
        (dequantized(quantize(values, name, each), name, values.shape) - values)[:, ::2].square().sum()
        for each in (None, importance)
    )
    assert weighted < 0.95 * plain


@pytest.mark.parametrize("name", QUANTIZED_TYPES)
def test_values_that_blocks_can_represent_stay_nearly_the_same(name):
    """Quantizing the values of a block again does not add a second error of the same size."""
    values = weights(3, rows=16)
    once = dequantized(quantize(values, name), name, values.shape)
    twice = dequantized(quantize(once, name), name, values.shape)
    assert relative_error(twice, once) < 0.55 * relative_error(once, values)


@pytest.mark.parametrize("name", QUANTIZED_TYPES)
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1e-6, 1.0]),
)
def test_any_finite_values_stay_within_a_step(name, extremes, seed, noise):
    """No value moves by more than the range of its group divided by the levels, with room for rounded scales."""
    values = torch.randn(2, 512, generator=torch.Generator().manual_seed(seed)) * noise
    places = torch.randint(0, values.numel(), (len(extremes),), generator=torch.Generator().manual_seed(seed + 1))
    values.view(-1)[places] = torch.tensor(extremes)
    result = dequantized(quantize(values, name), name, values.shape)
    assert result.isfinite().all()
    levels = 2 ** int(name[1])
    span = values.view(-1, 256 if name.endswith("K") else 32).abs().amax(1, keepdim=True)
    errors = (result - values).view(len(span), -1).abs()
    assert (errors <= 2.6 * span / levels + 1e-4).all()


@pytest.mark.parametrize("name", QUANTIZED_TYPES)
def test_zeros_stay_zeros_and_damaged_weights_are_refused(name):
    zeros = torch.zeros(2, 256)
    assert torch.equal(dequantized(quantize(zeros, name), name, zeros.shape), zeros)
    zeros[1, 3] = torch.nan
    with pytest.raises(ClearheadError, match="NaN or infinite"):
        quantize(zeros, name)
    if name != "Q8_0":
        with pytest.raises(ClearheadError, match="too large for this type"):
            quantize(torch.full((1, 256), -1e9).index_fill_(1, torch.tensor([1]), 1e8), name)
