"""Calibrated rounding against Optimal Brain Surgeon, row by row in float64, and against rounding without inputs."""

import pytest
import torch

from clearhead.backends.packed import pack, pack_calibrated
from clearhead.backends.packed.calibrated import _DAMPING


def correlated_inputs(columns, num=600, seed=0):
    """Return inputs (num, columns) of which some are much larger than others, and which depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(num, columns, generator=generator) @ mixing * torch.logspace(-1, 1, columns)


def output_error(packed, weight, inputs):
    return float((inputs @ (packed.unpack() - weight).T).square().mean())


@pytest.mark.parametrize(("bits", "ratio"), [("int4", 0.87), ("int8", 0.97)])
@pytest.mark.parametrize("columns", [64, 80, 96, 288])
def test_products_with_the_inputs_change_less_than_without_knowing_them(bits, ratio, columns):
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(1))
    inputs = correlated_inputs(columns)
    packed = pack_calibrated(weight, inputs.T @ inputs / len(inputs), bits)
    assert packed.shape == weight.shape
    assert packed.format == pack(weight, bits).format
    assert output_error(packed, weight, inputs) < ratio * output_error(pack(weight, bits), weight, inputs)


def round_by_surgeon(weight, moments, packed):
    """Return the values that Optimal Brain Surgeon (Hassibi and Stork 1993) gives on the grid of a packed weight.

    After each column, the inverse of the remaining second moments is computed anew; no factorization is involved.
    """
    values, rounded = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    damped = moments.double() + _DAMPING * moments.diagonal().mean() * torch.eye(len(moments))
    for k in range(weight.shape[1]):
        scale, offset = packed.scales[:, k // 32].double(), packed.offsets[:, k // 32].double()
        quants = ((values[:, k] - offset) / scale).round().clamp(0, 15)
        rounded[:, k] = quants * scale + offset
        inverse = damped[k:, k:].inverse()
        values[:, k:] -= torch.outer(values[:, k] - rounded[:, k], inverse[0] / inverse[0, 0])
    return rounded


def test_the_columns_are_moved_as_optimal_brain_surgeon_moves_them():
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(2))
    inputs = correlated_inputs(96, seed=3)
    moments = inputs.T @ inputs / len(inputs)
    packed = pack_calibrated(weight, moments, "int4")
    expected = round_by_surgeon(weight, moments, packed)
    same = (packed.unpack().double() - expected).abs() < 1e-4
    assert same.float().mean() > 0.99  # float32 may decide a tie differently, which moves later columns


def test_inputs_that_never_occur_do_no_harm():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    inputs = correlated_inputs(64)
    inputs[:, 10:50] = 0
    packed = pack_calibrated(weight, inputs.T @ inputs / len(inputs), "int4")
    assert packed.unpack().isfinite().all()
    assert output_error(packed, weight, inputs) < 0.75 * output_error(pack(weight, "int4"), weight, inputs)
    nothing = pack_calibrated(weight, torch.zeros(64, 64), "int4")
    assert float((nothing.unpack() - weight).abs().max()) < 0.5
