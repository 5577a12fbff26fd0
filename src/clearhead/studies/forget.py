"""Study: how far gradients reach back in time and down through layers (book A4, C1).

clearhead study forget
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead.architecture import Rope
from clearhead.model import Block, Residual
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, build_recurrent, random_generator, toy_decoder, toy_recurrent

WIDTH, LENGTH, NUM_LAYERS, BATCH = 32, 64, 24, 16
CELLS: dict[str, Literal["tanh", "gru", "lstm"]] = {"tanh RNN": "tanh", "GRU": "gru", "LSTM": "lstm"}
SEQUENCES = (*CELLS, "Transformer")
STACKS = ("pre-norm", "post-norm", "residuals only", "norms only", "neither")
DISTANCES, DEPTHS = (1, 4, 16, 63), (1, 6, 12, 24)


class _BranchOnly(nn.Module):
    """A residual connection without the residual: x becomes F(n(x)) instead of x + F(n(x))."""

    def __init__(self, residual: Residual):
        super().__init__()
        self.norm = residual.norm

    def forward(self, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        return branch(self.norm(x))


def _gradient_by_distance(name: str, seed: int) -> list[float]:
    """Return the gradient of the last state with respect to the input at each distance, relative to distance 0."""
    x, direction = torch.randn(2, BATCH, LENGTH, WIDTH, generator=random_generator(seed))
    x.requires_grad_()
    if name in CELLS:
        states = build_recurrent(toy_recurrent(vocab_size=2, width=WIDTH, cell=CELLS[name]), seed).encoder(x)[0]
    else:
        network = build(toy_decoder(vocab_size=2, width=WIDTH, context=LENGTH, position=Rope()), seed)
        assert network.decoder is not None
        network.decoder.embedding.register_forward_hook(lambda module, inputs, output: x)
        states = network.hidden_states(torch.zeros(BATCH, LENGTH, dtype=torch.long))
    (gradient,) = torch.autograd.grad((states[:, -1] * direction[:, -1]).sum(), x)
    norms = gradient.norm(dim=-1).mean(dim=0).flip(0)
    return (norms / norms[0]).tolist()


def _gradient_by_layer(name: str, seed: int) -> list[float]:
    """Return the gradient at the input of each layer of a deep stack, relative to that after the last layer."""
    placement: Literal["pre", "post"] = "post" if name == "post-norm" else "pre"
    config = toy_decoder(vocab_size=64, width=WIDTH, num_layers=NUM_LAYERS, position=Rope(), placement=placement)
    network = build(config, seed).double()  # without residuals and norms, gradients fall below the range of floats
    for block in network.modules():
        if isinstance(block, Block) and name in ("residuals only", "neither"):
            block.attention_residual.norm = block.feed_forward_residual.norm = nn.Identity()
        if isinstance(block, Block) and name in ("norms only", "neither"):
            block.attention_residual = _BranchOnly(block.attention_residual)  # type: ignore[assignment]
            block.feed_forward_residual = _BranchOnly(block.feed_forward_residual)  # type: ignore[assignment]
    generator = random_generator(seed)
    tokens = torch.randint(0, 64, (BATCH, LENGTH), generator=generator)
    residuals: dict[int, list[Tensor]] = {number: [] for number in range(NUM_LAYERS + 1)}
    network.hidden_states(tokens, residuals=residuals)
    streams = [residuals[number][0] for number in residuals]
    direction = torch.randn(streams[-1].shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((streams[-1] * direction).sum(), streams)
    return [float(gradient.norm() / gradients[-1].norm()) for gradient in gradients]


def _measure(run: Run) -> Measurements:
    found: Measurements = {"distance": {}, "layer": {}}
    for name in run.each((*SEQUENCES, *STACKS)):
        if name in STACKS:
            found["layer"][name] = _gradient_by_layer(name, run.seed)
        else:
            found["distance"][name] = _gradient_by_distance(name, run.seed)
    return found


def _holds(found: Measurements) -> bool:
    far = {name: gradients[-1] for name, gradients in found["distance"].items()}
    bottom = {name: gradients[0] for name, gradients in found["layer"].items()}
    forgets = far["tanh RNN"] < 1e-6 and far["GRU"] < 1e-4 and far["Transformer"] > 1e-3
    return forgets and 0.1 < bottom["pre-norm"] < 30 and bottom["neither"] < 1e-3


def _conclude(results: Sequence[Measurements]) -> str:
    def at(kind: str, name: str, index: int) -> float:
        return mean([found[kind][name][index] for found in results])

    far = ", ".join(f"{name} {at('distance', name, -1):.0e}" for name in SEQUENCES)
    bottom = ", ".join(f"{name} {at('layer', name, 0):.1g}" for name in STACKS)
    return f"gradient over {LENGTH - 1} tokens: {far}; through {NUM_LAYERS} layers: {bottom}"


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = {name: [[found["distance"][name][each] for each in DISTANCES] for found in results] for name in SEQUENCES}
    for name in STACKS:
        rows[f"{name}, layers"] = [[found["layer"][name][NUM_LAYERS - each] for each in DEPTHS] for found in results]
    columns = [f"over {each} tokens or {depth} layers" for each, depth in zip(DISTANCES, DEPTHS, strict=True)]
    return spread_table("relative gradient", columns, rows, digits=2)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    for axes, kind, names in zip(figure.subplots(1, 2), ("distance", "layer"), (SEQUENCES, STACKS), strict=True):
        for color, name in zip(COLORS, names, strict=False):
            rows = [found[kind][name] for found in results]
            plot_spread(axes, range(len(rows[0])), rows, label=name, color=color)
        title = "Through time" if kind == "distance" else f"Through {NUM_LAYERS} layers of a Transformer"
        x = "distance to the last token" if kind == "distance" else "layer whose input receives the gradient"
        finish_axes(axes, title=title, x=x, y="relative gradient", yscale="log")


STUDY = Study(
    entry=ENTRIES["forget"],
    claim="""A recurrent network passes everything through a chain of states and forgets what is far away, while
        attention connects every two tokens directly (A4). Residual connections and norms let gradients pass through
        many layers (C1).""",
    setup=f"""Random networks, before any training. Left: the gradient of the last of {LENGTH} states with respect to
        each input, for three recurrent cells and a Transformer of two layers, relative to the gradient of the last
        input. Right: the gradient at the input of each of {NUM_LAYERS} layers, relative to that after the last
        layer.""",
    explanation="""The gradient over k steps of a recurrent network is a product of k matrices. With the usual
        initial weights each makes it smaller, so it falls exponentially; the gates of GRU and LSTM slow the fall. In
        a Transformer the path from any token to any other has one step per layer, whatever the distance; in a long
        text each token only gets a smaller share of the attention. Down the layers, x + F(x) adds an identity to every
        factor of the product, and a norm divides by the size of its input, which undoes what the layer below took
        away. Each alone keeps the size of the gradient; without both it vanishes.""",
    limits="""Gradients of random weights say how training starts. Trained gates can hold a gradient for longer, and
        post-norm networks train with a slow warm-up of the learning rate.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
)
