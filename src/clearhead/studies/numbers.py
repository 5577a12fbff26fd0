"""Numbers of several seeds as text and as tables, power laws fitted to them, and formulas of costs.

spread([1.0, 1.2, 1.1]); fit_slope([1, 2, 4], [3, 6, 12])   # '1.1 (1-1.2)', 1.0
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from clearhead.studies.study import Table


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return float(np.mean(values))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean with the smallest and the largest value: `1.39 (1.38-1.40)`, or one number if all agree."""
    low, middle, high = (f"{value:.{digits}g}" for value in (min(values), mean(values), max(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of the power law y = c·xᵖ that fits best in logarithms."""
    return float(np.polyfit(np.log(np.asarray(x, dtype=float)), np.log(np.asarray(y, dtype=float)), 1)[0])


def spread_table(
    heading: str, columns: Sequence[str], rows: Mapping[str, Sequence[Sequence[float]]], digits: int = 3
) -> Table:
    """Return a table whose cells are spreads. Each row has one list of numbers per seed, one number per column."""
    cells = {name: [spread(values, digits) for values in zip(*numbers, strict=True)] for name, numbers in rows.items()}
    return Table((heading, *columns), [(name, *texts) for name, texts in cells.items()])


def evaluate_formula(formula: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products such as `2 b n d + d d`."""
    terms = [[int(sizes.get(factor, factor)) for factor in term.split()] for term in formula.split(" + ")]
    return sum(math.prod(term) for term in terms)


def evaluate_rows(rows: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the values of all formulas of a table."""
    return {name: [evaluate_formula(formula, sizes) for formula in formulas] for name, formulas in rows.items()}


def typeset_formula(formula: str) -> str:
    """Return a formula as the book writes it: `2 b n d + d d` becomes `2bnd + d²`."""
    return formula.replace("d d", "d²").replace("n n", "n²").replace(" + ", "+").replace(" ", "").replace("+", " + ")
