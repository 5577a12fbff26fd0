"""Limits of the sizes in a config, and of how much of a file an error message repeats."""

from dataclasses import dataclass

import pytest

from clearhead.architecture import ModelConfig
from clearhead.config import CheckedConfig, from_toml
from clearhead.errors import ClearheadError


def test_a_value_is_not_repeated_in_full():
    for text in (
        f'width = "{"x" * 10**6}"',
        f"head = 0x{'f' * 10_000}",
        f"width = [{'1, ' * 10**5}]",
        f"{'x' * 10**6} = 1",
    ):
        with pytest.raises(ClearheadError) as caught:
            from_toml(ModelConfig, text)
        assert len(str(caught.value)) < 300


@dataclass(frozen=True, kw_only=True)
class Sizes(CheckedConfig):
    MAY_BE_LARGE = ("seed",)

    width: int
    seed: int = 1
    theta: float = 1.0


def test_a_size_is_at_most_a_billion_except_a_seed():
    with pytest.raises(ClearheadError, match=r"^Sizes\.width is 1000000001; it must be at most 1000000000"):
        Sizes(width=10**9 + 1)
    assert Sizes(width=10**9, seed=2**60, theta=10**12).theta == 10**12


def test_a_number_fits_in_float32():
    with pytest.raises(ClearheadError, match=r"^Sizes\.theta is 1e\+308; it must be at most 3\.4e\+38$"):
        Sizes(width=1, theta=1e308)
