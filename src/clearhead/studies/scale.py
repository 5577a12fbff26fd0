"""Study: the variance of scores, and what the softmax does with and without division by √d (book A2, A3, A6).

clearhead study scale
"""

from collections.abc import Sequence

import torch

from clearhead.model import Mask, Scoring, attention_steps
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import fit_slope, mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import random_generator

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
NUM_QUERIES, NUM_KEYS = 64, 64
SCALINGS = {"q·k": 0.0, "q·k / √d": -0.5}  # name -> exponent of d in the scale
QUANTITIES = ("variance", "largest", "entropy", "gradient")
TITLES = ("Variance of the scores", "Largest weight", "Entropy (nats)", "Gradient through the softmax")
OTHER_MEAN, OTHER_DEVIATION = 0.5, 2.0


def _measure(run: Run) -> Measurements:
    found: Measurements = {name: {quantity: [] for quantity in QUANTITIES} for name in SCALINGS}
    found |= {"mean_over_d": [], "variance_over_d": []}
    num_batches = run.size(64, 2)
    for width in run.each(WIDTHS, name=lambda width: f"d = {width}"):
        generator = random_generator(run.seed, width)
        q, k = torch.randn(2, num_batches, 1, NUM_QUERIES, width, generator=generator, dtype=torch.float64)
        for name, exponent in SCALINGS.items():
            steps = attention_steps(q, k, k, Scoring(Mask(), scale=width**exponent))
            weights = steps.weights
            # The derivative of a softmax is diag(a) - a aᵀ. Its trace, Σ a(1 - a), is 0 for a one-hot row.
            numbers = {
                "variance": steps.scores.var(),
                "largest": weights.amax(dim=-1).mean(),
                "entropy": torch.special.entr(weights).sum(dim=-1).mean(),
                "gradient": (weights * (1 - weights)).sum(dim=-1).mean(),
            }
            for quantity, number in numbers.items():
                found[name][quantity].append(float(number))
        shifted = ((q + OTHER_MEAN) * (k + OTHER_MEAN)).sum(dim=-1)  # E[q·k] = d μ²
        found["mean_over_d"].append(float(shifted.mean()) / width)
        wide = OTHER_DEVIATION**2 * (q * k).sum(dim=-1)  # Var[q·k] = d σ⁴
        found["variance_over_d"].append(float(wide.var()) / width)
    return found


def _holds(found: Measurements) -> bool:
    unscaled, scaled = (found[name] for name in SCALINGS)
    grows = abs(fit_slope(WIDTHS, unscaled["variance"]) - 1) < 0.02
    constant = all(abs(variance - 1) < 0.15 for variance in scaled["variance"])
    saturates = unscaled["largest"][-1] > 0.9 and scaled["largest"][-1] < 0.2
    vanishes = unscaled["gradient"][-1] < 0.15 < 0.8 < scaled["gradient"][-1]
    general = abs(mean(found["mean_over_d"]) - OTHER_MEAN**2) < 0.05
    return grows and constant and saturates and vanishes and general


def _conclude(results: Sequence[Measurements]) -> str:
    unscaled, scaled = ([found[name] for found in results] for name in SCALINGS)
    slope = mean([fit_slope(WIDTHS, each["variance"]) for each in unscaled])
    return (
        f"the variance of q·k grows like d^{slope:.2f}; at d = {WIDTHS[-1]} the softmax of unscaled scores gives "
        f"{mean([each['largest'][-1] for each in unscaled]):.2f} of the weight to one of {NUM_KEYS} keys and keeps a "
        f"gradient of {mean([each['gradient'][-1] for each in unscaled]):.2f}, with division by √d "
        f"{mean([each['largest'][-1] for each in scaled]):.2f} and "
        f"{mean([each['gradient'][-1] for each in scaled]):.2f}"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    columns = [(quantity, name) for quantity in QUANTITIES for name in SCALINGS]
    rows = {
        str(width): [[found[name][quantity][index] for quantity, name in columns] for found in results]
        for index, width in enumerate(WIDTHS)
    }
    return spread_table("d", [f"{quantity}, {name}" for quantity, name in columns], rows)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    for axes, quantity, title in zip(figure.subplots(1, 4), QUANTITIES, TITLES, strict=True):
        for color, name in zip(COLORS, SCALINGS, strict=False):
            rows = [found[name][quantity] for found in results]
            plot_spread(axes, WIDTHS, rows, label=name, color=color, marker="o")
        if quantity == "variance":
            finish_axes(axes, title=title, x="d", xscale="log", yscale="log")
        else:
            finish_axes(axes, title=title, x="d", xscale="log", ylim=(0, None), legend=False)


STUDY = Study(
    entry=ENTRIES["scale"],
    claim="""For queries and keys whose entries are independent with mean μ and deviation σ, q·k has mean d μ², and
        for μ = 0 variance d σ⁴. Dividing by √d makes the variance of standard normal vectors 1 for every d; without
        it the softmax saturates (A3).""",
    setup=f"""For d from {WIDTHS[0]} to {WIDTHS[-1]}, random queries attend to {NUM_KEYS} random keys each, with
        scale 1 and with scale 1/√d, through the attention function of the network. Measured are the variance of the
        scores, the largest weight of each row, the entropy of the rows, and Σ a(1 − a), the trace of the derivative
        diag(a) − a aᵀ of the softmax.""",
    explanation=f"""q·k is a sum of d independent products with mean 0 and variance 1 each, so its variance is d and
        its deviation √d. Scores with a deviation of √{WIDTHS[-1]} = 32 differ by dozens, and the softmax of such
        scores is almost one-hot: this is a low temperature (A6). Where the weights are 0 or 1, the derivative of the
        softmax is 0, and queries and keys receive no gradient. Vectors with mean {OTHER_MEAN} and with deviation
        {OTHER_DEVIATION:g} confirm d μ² and d σ⁴; table.json has those numbers.""",
    limits="""The vectors are random, as at the start of training. A trained head may learn large scores on purpose;
        the division only decides where it starts.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(13.0, 3.6),
)
