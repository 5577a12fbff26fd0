"""Study: the loss of small language models against their parameters and their data, with fitted power laws.

clearhead study scaling
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from clearhead.api import cost
from clearhead.architecture import ModelConfig, Rope
from clearhead.model import Transformer
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import fit_slope, mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, english_text, random_generator, text_rows, toy_decoder, train

WIDTHS = (8, 16, 32, 64)
STEPS = (30, 60, 120, 240)
LENGTH, BATCH, DATA_WIDTH = 64, 16, 32
LARGER, TOKENS_PER_PARAMETER = 768, 20  # a model that `clearhead cost` is asked about; Hoffmann et al. 2022, Table 3


def _config(width: int, vocab_size: int) -> ModelConfig:
    return toy_decoder(vocab_size=vocab_size, width=width, num_heads=width // 8, context=LENGTH, position=Rope())


def _num_parameters(config: ModelConfig) -> int:
    """Return the parameters of the layers, without embedding and head (Kaplan et al. 2020, §2.1)."""
    return sum(count for part, count in cost(config).parameters.items() if part not in ("embedding", "head"))


def _measure(run: Run) -> Measurements:
    text, vocab_size = english_text()
    boundary = len(text) * 9 // 10
    unseen = text_rows(text[boundary:], run.size(256, 2), LENGTH, random_generator(run.seed))

    def train_one(width: int, num_steps: int) -> float:
        network = build(_config(width, vocab_size), run.seed)

        def loss_of(step: int) -> Tensor:
            rows = text_rows(text[:boundary], BATCH, LENGTH, random_generator(run.seed, step))
            return cross_entropy(network(rows[:, :-1]), rows[:, 1:])

        train(network, loss_of, num_steps=run.size(num_steps, 2), learning_rate=min(8e-3, 0.2 / width))
        return _evaluate(network, unseen)

    most = STEPS[-1]
    runs = [*((width, most) for width in WIDTHS), *((DATA_WIDTH, steps) for steps in STEPS[:-1])]
    losses = {pair: train_one(*pair) for pair in run.each(runs, lambda pair: f"width {pair[0]}, {pair[1]} steps")}
    return {
        "parameters": [_num_parameters(_config(width, vocab_size)) for width in WIDTHS],
        "loss_by_parameters": [losses[width, most] for width in WIDTHS],
        "tokens": [steps * BATCH * LENGTH for steps in STEPS],
        "loss_by_tokens": [losses[DATA_WIDTH, steps] for steps in STEPS],
    }


@torch.no_grad()
def _evaluate(network: Transformer, rows: Tensor) -> float:
    return cross_entropy(network(rows[:, :-1]), rows[:, 1:]).item()


def _exponents(found: Measurements) -> tuple[float, float]:
    """Return the exponents of the loss in the number of parameters and of tokens, both negative."""
    return (
        fit_slope(found["parameters"], found["loss_by_parameters"]),
        fit_slope(found["tokens"], found["loss_by_tokens"]),
    )


def _largest_misfit(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the largest relative distance of a loss from the fitted power law."""
    slope = fit_slope(x, y)
    logs = np.log(y) - slope * np.log(x)
    return float(np.abs(np.exp(logs - logs.mean()) - 1).max())


def _holds(found: Measurements) -> bool:
    by_parameters, by_tokens = found["loss_by_parameters"], found["loss_by_tokens"]
    falls = all(sorted(losses, reverse=True) == losses for losses in (by_parameters, by_tokens))
    misfits = (_largest_misfit(found["parameters"], by_parameters), _largest_misfit(found["tokens"], by_tokens))
    return falls and max(misfits) < 0.06


def _conclude(results: Sequence[Measurements]) -> str:
    exponents = np.array([_exponents(found) for found in results])
    (parameters, tokens), (parameters_error, tokens_error) = exponents.mean(axis=0), exponents.std(axis=0, ddof=1)
    large = _config(LARGER, english_text()[1])
    size = cost(large).total_parameters
    flops = cost(large, phase="train", training_tokens=TOKENS_PER_PARAMETER * size).training_flops
    return (
        f"the loss falls like parameters^({parameters:.3f} ± {parameters_error:.3f}) and like "
        f"tokens^({tokens:.3f} ± {tokens_error:.3f}); a model of width {LARGER} would have {size / 1e6:.0f} million "
        f"parameters and take {flops or 0:.0e} FLOPs for {TOKENS_PER_PARAMETER} tokens per parameter"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    numbers, losses = results[0]["parameters"], "loss_by_parameters"
    rows = {f"{number:,} parameters": [[found[losses][at]] for found in results] for at, number in enumerate(numbers)}
    for at, number in enumerate(results[0]["tokens"]):
        rows[f"{number:,} tokens"] = [[found["loss_by_tokens"][at]] for found in results]
    return spread_table("", ["loss on unseen text"], rows, digits=4)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    for axes, kind, color in zip(figure.subplots(1, 2, sharey=True), ("parameters", "tokens"), COLORS, strict=False):
        x, rows = results[0][kind], [found[f"loss_by_{kind}"] for found in results]
        plot_spread(axes, x, rows, label="measured", color=color, marker="o", linestyle="")
        slope, means = fit_slope(x, [mean(column) for column in zip(*rows, strict=True)]), np.array(rows).mean(axis=0)
        constant = np.exp((np.log(means) - slope * np.log(x)).mean())
        axes.plot(
            x, constant * np.array(x, dtype=float) ** slope, ":", color="black", label=f"{constant:.2f} · x^{slope:.3f}"
        )
        fixed = f"{STEPS[-1] * BATCH * LENGTH:,} tokens" if kind == "parameters" else f"width {DATA_WIDTH}"
        finish_axes(axes, title=f"Loss and {kind} ({fixed})", x=kind, y="loss (nats)", xscale="log", yscale="log")


STUDY = Study(
    entry=ENTRIES["scaling"],
    claim="""The loss of language models falls like a power law of their size and of their data (Kaplan et al. 2020;
        Hoffmann et al. 2022). The book counts the FLOPs of a training run with F1 to F3.""",
    setup=f"""Decoders of two layers with widths {", ".join(map(str, WIDTHS))} read the same English characters, and
        the one of width {DATA_WIDTH} also reads fewer of them. Every run has its own schedule of learning rates,
        which ends at 0. The power law is a line in logarithms; its error is the deviation of the exponents over the
        seeds.""",
    explanation="""Over this short range the points lie close to a line. Larger models learn more from each token,
        and more tokens help every model; a budget of FLOPs, 6 per parameter and token, has to be divided between
        both.""",
    limits="""Four points over two orders of magnitude fit many curves. The law has no constant for the entropy of
        the text itself, so it must not be extended far. The learning rate falls with the width by rule and is not
        tuned.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
)
