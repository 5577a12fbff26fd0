"""The numbers of studies: spreads, fitted exponents and formulas of costs."""

import pytest
import torch

from clearhead.studies.numbers import evaluate_formula, fit_slope, spread, spread_table, typeset_formula
from clearhead.studies.toys import english_text, random_generator, text_rows, train


def test_a_spread_has_mean_minimum_and_maximum():
    assert spread([1.0, 2.0, 3.0]) == "2 (1-3)"
    assert spread([1.38629, 1.38631], digits=4) == "1.386"
    assert spread([5]) == "5"


def test_a_table_has_one_cell_per_column():
    table = spread_table("network", ["loss", "bytes"], {"small": [(1.0, 64), (3.0, 64)]})
    assert table.headings == ("network", "loss", "bytes")
    assert table.rows == [("small", "2 (1-3)", "64")]


@pytest.mark.parametrize("exponent", [-0.5, 1.0, 3.0])
def test_a_fit_finds_the_exponent_of_a_power_law(exponent):
    x = [10, 20, 40, 80]
    assert fit_slope(x, [7 * value**exponent for value in x]) == pytest.approx(exponent)


def test_formulas_are_evaluated_and_typeset():
    sizes = {"b": 2, "n": 3, "d": 5, "m": 7}
    assert evaluate_formula("2 b n d + b m n n", sizes) == 2 * 2 * 3 * 5 + 2 * 7 * 9
    assert typeset_formula("2 b n d + b m n n") == "2bnd + bmn²"
    assert typeset_formula("16 b n d d") == "16bnd²"


def test_training_minimizes_and_leaves_the_network_in_evaluation_mode():
    layer, rate = torch.nn.Linear(3, 1), 5e-2
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    x = torch.randn(64, 3, generator=random_generator(0))
    target = x.sum(dim=1, keepdim=True)
    losses = train(layer, lambda step: (layer(x) - target).square().mean(), num_steps=100, learning_rate=rate)
    assert losses[-1] < 0.01 * losses[0]
    assert not layer.training


def test_generators_differ_by_every_part_of_their_key():
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, -1)]
    assert len({random_generator(*key).initial_seed() for key in keys}) == len(keys)


def test_the_text_is_english_and_rows_are_pieces_of_it():
    text, alphabet_size = english_text()
    assert len(text) > 100_000
    assert text.max() + 1 == alphabet_size < 200
    rows = text_rows(text, 4, 10, random_generator(0))
    assert rows.shape == (4, 11)
    windows = text.unfold(0, 11, 1)
    assert all((windows == row).all(dim=1).any() for row in rows)
