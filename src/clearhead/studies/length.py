"""Study: position encodings on texts longer than those of the training (book B1 to B4).

clearhead study length
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.architecture import (
    Alibi,
    DynamicScaling,
    NoPosition,
    Position,
    RelativeSinusoid,
    Rope,
    Scaling,
    SinusoidalPositions,
    YarnScaling,
)
from clearhead.model import Transformer
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, english_text, random_generator, text_rows, toy_decoder, train

TRAINED, TESTED, BUCKET = 32, 256, 32  # characters
NUM_STEPS, WIDTH, BATCH = 300, 32, 24
SCHEMES: dict[str, Position | SinusoidalPositions | tuple[Position, ...]] = {
    "RoPE": Rope(),
    "iRoPE": (Rope(), NoPosition()),  # the second layer has no positions
    "NoPE": NoPosition(),
    "ALiBi": Alibi(),
    "relative (Gopher)": RelativeSinusoid(),
    "sinusoidal": SinusoidalPositions(),
}
SCALINGS: dict[str, Scaling] = {  # the network trained with RoPE, with lower frequencies in the test
    "RoPE, dynamic": DynamicScaling(factor=1.0, original_context=TRAINED),
    "RoPE, YaRN": YarnScaling(factor=TESTED / TRAINED, original_context=TRAINED, attention_factor=1.21),
}
CURVES = ("RoPE", *SCALINGS, *list(SCHEMES)[1:])


def _with_scaling(network: Transformer, scaling: Scaling) -> Transformer:
    """Return the same weights with lower frequencies."""
    config = toy_decoder(vocab_size=network.config.vocab_size, width=WIDTH, position=Rope(scaling=scaling))
    copy = build(config, seed=0)
    copy.load_state_dict(network.state_dict())
    return copy.eval()


@torch.no_grad()
def _loss_by_position(network: Transformer, rows: Tensor) -> list[float]:
    """Return the mean loss of each bucket of positions."""
    logits = network(rows[:, :-1])
    losses = functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")  # (B, T)
    return losses.mean(dim=0).unflatten(0, (-1, BUCKET)).mean(dim=1).tolist()


def _measure(run: Run) -> Measurements:
    text, vocab_size = english_text()
    boundary = len(text) * 9 // 10
    unseen = text_rows(text[boundary:], run.size(128, 2), TESTED, random_generator(run.seed))
    found: Measurements = {}
    for name in run.each(SCHEMES):
        network = build(toy_decoder(vocab_size=vocab_size, width=WIDTH, position=SCHEMES[name]), run.seed)

        def loss_of(step: int, network: Transformer = network) -> Tensor:
            rows = text_rows(text[:boundary], BATCH, TRAINED, random_generator(run.seed, step))
            return cross_entropy(network(rows[:, :-1]), rows[:, 1:])

        train(network, loss_of, num_steps=run.size(NUM_STEPS, 2), learning_rate=5e-3)
        found[name] = _loss_by_position(network, unseen)
        if name == "RoPE":
            for each, scaling in SCALINGS.items():
                found[each] = _loss_by_position(_with_scaling(network, scaling), unseen)
    return found


def _growth(found: Measurements, name: str, bucket: int = -1) -> float:
    """Return by how much the loss in a bucket, or at the end of the texts, exceeds that within the trained length."""
    return float(found[name][bucket] - found[name][0])


def _holds(found: Measurements) -> bool:
    stable = all(_growth(found, name) < 0.15 for name in ("ALiBi", "relative (Gopher)"))
    fails = all(_growth(found, name) > 0.3 for name in ("RoPE", "sinusoidal"))
    dynamic = _growth(found, "RoPE, dynamic", 1) < 0.5 * _growth(found, "RoPE", 1)  # up to twice the trained length
    return stable and fails and dynamic and _growth(found, "RoPE, YaRN") < 0.5 * _growth(found, "RoPE")


def _conclude(results: Sequence[Measurements]) -> str:
    def change(name: str) -> str:
        first, last = (mean([found[name][index] for found in results]) for index in (0, -1))
        return f"{name} {first:.2f} to {last:.2f}"

    rising = ", ".join(change(name) for name in ("RoPE", "sinusoidal", "iRoPE", "NoPE"))
    level = ", ".join(change(name) for name in ("RoPE, YaRN", "ALiBi", "relative (Gopher)"))
    return (
        f"after training on {TRAINED} characters, the loss of the first and the last {BUCKET} of {TESTED} rises with "
        f"{rising}, and little or not at all with {level}"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    columns = [f"{start}-{start + BUCKET - 1}" for start in range(0, TESTED, BUCKET)]
    return spread_table("positions", columns, {name: [found[name] for found in results] for name in CURVES})


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    axes = figure.subplots()
    centers = [start + BUCKET / 2 for start in range(0, TESTED, BUCKET)]
    for color, name in zip(COLORS, CURVES, strict=False):
        plot_spread(axes, centers, [found[name] for found in results], label=name, color=color, marker="o")
    axes.axvline(TRAINED, color="black", linestyle=":", linewidth=1)
    axes.text(TRAINED + 2, axes.get_ylim()[1], "trained length", va="top", fontsize=8)
    title, x, y = "Loss on unseen text", "position of the character", "loss (nats per character)"
    finish_axes(axes, title=title, x=x, y=y, legend=False)
    figure.legend(loc="outside right center", fontsize=8, frameon=False)


STUDY = Study(
    entry=ENTRIES["length"],
    claim="""RoPE may fail beyond the length of the training (B4). Encodings that depend on the distance only and
        fall off with it, such as ALiBi and Gopher's relative form, continue (B3). Lowering the frequencies of RoPE
        with the length helps (B2); iRoPE mixes layers with and without RoPE.""",
    setup=f"""Networks of two layers and width {WIDTH}, which differ only in their position encoding, learn to
        predict the next character of English text, in pieces of {TRAINED} characters, for {NUM_STEPS} steps. They
        then read pieces of {TESTED} unseen characters. "Dynamic" and "YaRN" are the network trained with RoPE, whose
        frequencies are lowered in the test only: dynamic scaling lowers all but the fastest, the more the longer the
        text is; YaRN divides the slow ones by {TESTED // TRAINED}.""",
    explanation="""Beyond the trained length, RoPE meets angles between query and key that never occurred, and
        sinusoids are vectors that the network has never seen. ALiBi subtracts a multiple of the distance, so far
        keys lose weight however long the text is, and the relative form learned to ignore far keys. Scaling squeezes
        long distances into the range of trained angles: dynamic scaling squeezes the middle frequencies too little
        for texts much longer than twice the training, YaRN enough, at the price of a higher loss at the start.""",
    limits="""Characters of English text need little context: ignoring far characters costs nothing here, which
        favors ALiBi. Large models with RoPE are trained further on long texts, which this study leaves out.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(9.0, 4.6),
)
