"""Study: whether a network without position encodings knows the positions of its tokens (book B4).

clearhead study nope
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from clearhead.architecture import AttentionPattern, Bidirectional, Causal, GroupedAttention
from clearhead.model import Attention, AttentionContext, Mask, fused_attention
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, random_generator, toy_decoder, train

LENGTH, BEGIN, NUM_STEPS = 24, 0, 500
PATTERNS: dict[str, AttentionPattern] = {"causal": Causal(), "bidirectional": Bidirectional()}
CONSTRUCTED, LEARNED = "constructed", "learned"
HEAD_WIDTH = 8


def _random_text(seed: int, step: int, num_rows: int) -> Tensor:
    """Return random tokens after a begin token: apart from the first one, no token tells its position."""
    tokens = torch.randint(1, LENGTH, (num_rows, LENGTH), generator=random_generator(seed, step))
    tokens[:, 0] = BEGIN
    return tokens


def _decode_positions(run: Run, name: str) -> list[float]:
    """Train a network without position encodings to say where each token stands; return its accuracy by position."""
    network = build(toy_decoder(vocab_size=LENGTH, width=32, context=LENGTH, pattern=PATTERNS[name]), run.seed)
    positions = torch.arange(LENGTH)

    def loss_of(step: int) -> Tensor:
        tokens = _random_text(run.seed, step, 32)
        return cross_entropy(network(tokens), positions.expand_as(tokens))

    train(network, loss_of, num_steps=run.size(NUM_STEPS, 3), learning_rate=5e-3)
    with torch.no_grad():
        is_right = network(_random_text(run.seed, -1, run.size(256, 4))).argmax(dim=-1) == positions
    return is_right.float().mean(dim=0).tolist()


def _one_head(seed: int) -> Attention:
    """Return an attention layer with one head, random weights and the identity as its output projection."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = Attention(GroupedAttention(num_heads=1, num_kv_heads=1, head_width=HEAD_WIDTH), HEAD_WIDTH)
    nn.init.eye_(attention.output.weight)
    return attention


def _constructed_head() -> Attention:
    """Return the head of the book: all keys are equal, and only the begin token has a value."""
    attention = _one_head(seed=0)
    nn.init.zeros_(attention.key.weight)
    nn.init.zeros_(attention.value.weight)
    with torch.no_grad():
        attention.key.weight[:, 0] = 1.0  # entry 0 of the input is 1 for every token
        attention.value.weight[0, 1] = 1.0  # entry 1 is 1 for the begin token only
    return attention


def _head_inputs(generator: torch.Generator, num_rows: int) -> Tensor:
    """Return inputs (B, T, D): 1, whether the token is the begin token, and noise that stands for words."""
    x = torch.randn(num_rows, LENGTH, HEAD_WIDTH, generator=generator)
    x[..., 0], x[..., 1] = 1.0, 0.0
    x[:, 0, 1] = 1.0
    return x


def _head_output(attention: Attention, x: Tensor) -> Tensor:
    return attention(x, AttentionContext(Mask(causal=True), fused_attention, torch.arange(LENGTH)[None]))[..., 0]


def _measure(run: Run) -> Measurements:
    accuracy = {name: _decode_positions(run, name) for name in run.each(PATTERNS)}
    target = 1 / torch.arange(1, LENGTH + 1)
    learned = _one_head(run.seed)

    def loss_of(step: int) -> Tensor:
        x = _head_inputs(random_generator(run.seed, step), 64)
        return functional.mse_loss(_head_output(learned, x), target.expand(64, -1))

    train(learned, loss_of, num_steps=run.size(NUM_STEPS, 3), learning_rate=2e-2)
    x = _head_inputs(random_generator(run.seed, -1), 64)
    with torch.no_grad():
        heads = {CONSTRUCTED: _head_output(_constructed_head(), x), LEARNED: _head_output(learned, x)}
    outputs = {name: output.mean(dim=0).tolist() for name, output in heads.items()}
    errors = {name: float((output - target).abs().mean()) for name, output in heads.items()}
    return {"accuracy": accuracy, "outputs": outputs, "errors": errors}


def _holds(found: Measurements) -> bool:
    chance = 2 / LENGTH  # the begin token is always right, and all others have one guess
    decodes = mean(found["accuracy"]["causal"]) > 0.9 and mean(found["accuracy"]["bidirectional"]) < 1.5 * chance
    return decodes and found["errors"][CONSTRUCTED] < 1e-6 and found["errors"][LEARNED] < 0.02


def _conclude(results: Sequence[Measurements]) -> str:
    causal, bidirectional = (mean([mean(found["accuracy"][name]) for found in results]) for name in PATTERNS)
    error = mean([found["errors"][LEARNED] for found in results])
    return (
        f"without position encodings, {causal:.2f} of {LENGTH} positions can be read from a causal network and "
        f"{bidirectional:.2f} from a bidirectional one; a single causal head learns 1/t to within {error:.0e}"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = {f"positions decoded, {name}": [[mean(found["accuracy"][name])] for found in results] for name in PATTERNS}
    for name in (CONSTRUCTED, LEARNED):
        rows[f"error of 1/t, {name} head"] = [[found["errors"][name]] for found in results]
    return spread_table("", ["mean"], rows)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    decoded, heads = figure.subplots(1, 2)
    places = range(1, LENGTH + 1)
    for color, name in zip(COLORS, PATTERNS, strict=False):
        plot_spread(decoded, places, [found["accuracy"][name] for found in results], label=name, color=color)
    finish_axes(decoded, title="Share of positions decoded", x="position t", y="accuracy", ylim=(0, 1.03))
    for name, color, style in ((CONSTRUCTED, COLORS[0], "-"), (LEARNED, COLORS[1], "--")):
        rows = [found["outputs"][name] for found in results]
        plot_spread(heads, places, rows, label=f"{name} head", color=color, linestyle=style)
    finish_axes(heads, title="One causal head: 1/t", x="position t", y="output", xscale="log", yscale="log")


STUDY = Study(
    entry=ENTRIES["nope"],
    claim="""A causal head can compute 1/t without any position input, if the text starts with a begin token: so a
        causal network needs no position encoding to know positions (B4).""",
    setup=f"""Texts are {LENGTH} random tokens after a begin token. Two networks without position encodings, one
        causal and one bidirectional, train for {NUM_STEPS} steps to say the position of every token. Beside them
        stand one head with the weights of the book's construction, and one that learns 1/t from random weights.""",
    explanation="""All keys of the constructed head are equal, so token t attends to t tokens with weight 1/t each.
        Only the begin token has a value, and the output is 1/t. The causal mask is what makes this possible: it lets
        token t see exactly t tokens. Without it every token sees the same set, and attention does not depend on
        order (A8), so only the begin token can be told from the others.""",
    limits="""That positions can be decoded does not mean that a language model without encodings uses them well: the
        study "length" compares them. 1/t and 1/(t + 1) are hard to tell apart for large t.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
)
