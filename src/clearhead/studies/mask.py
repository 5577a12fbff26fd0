"""Study: the causal mask before the softmax, after it, after it with renormalized rows, and none (book A5, D2).

clearhead study mask
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.architecture import Rope
from clearhead.cache import KeyValueCache, forward_hidden
from clearhead.model import AttentionKernel, Mask, Scoring, Transformer, attention_steps, reference_attention
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, bar_spread, finish_axes, plot_spread
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, random_generator, toy_decoder, train

NUM_LETTERS, LENGTH, NUM_STEPS = 4, 16, 800
CHANCE = math.log(NUM_LETTERS)


def _attend_to_all(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attention without a mask."""
    return reference_attention(q, k, v, replace(scoring, mask=Mask()))


def _softmax_then_mask(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attention whose weights are set to 0 after a softmax over all tokens; with a cache, the queries come last."""
    return attention_steps(q, k, v, replace(scoring, mask=Mask())).weights.tril(k.shape[2] - q.shape[2]) @ v


def _softmax_then_mask_then_divide(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """The same, with each row of weights divided by its sum."""
    weights = attention_steps(q, k, v, replace(scoring, mask=Mask())).weights.tril(k.shape[2] - q.shape[2])
    return weights / weights.sum(dim=-1, keepdim=True) @ v


KERNELS: dict[str, AttentionKernel] = {
    "before softmax": reference_attention,
    "after softmax": _softmax_then_mask,
    "after, renormalized": _softmax_then_mask_then_divide,
    "no mask": _attend_to_all,
}
HONEST = ("before softmax", "after, renormalized")
KINDS = {"loss in one pass": "trained", "loss token by token": "token_by_token", "mean of all letters": "unrelated"}


@torch.no_grad()
def _losses_token_by_token(network: Transformer, kernel: AttentionKernel, text: Tensor) -> tuple[float, float]:
    """Feed one token at a time, as in generation; return the loss, and its mean if every letter were the next."""
    cache = KeyValueCache(network.config)
    steps = [forward_hidden(network, token, cache, kernel=kernel) for token in text[:, :-1].split(1, dim=1)]
    logits = network.compute_logits(torch.cat(steps, dim=1))
    return cross_entropy(logits, text[:, 1:]).item(), -logits.log_softmax(dim=-1).mean().item()


def _measure(run: Run) -> Measurements:
    def text(step: int, num_rows: int = 32) -> Tensor:
        return torch.randint(0, NUM_LETTERS, (num_rows, LENGTH + 1), generator=random_generator(run.seed, step))

    config = toy_decoder(vocab_size=NUM_LETTERS, width=32, position=Rope())
    unseen = text(-1, num_rows=512)
    found: Measurements = {kind: {} for kind in (*KINDS.values(), "curves")}
    for name, kernel in run.each(KERNELS.items(), name=lambda item: item[0]):
        network = build(config, run.seed)

        def loss_of(step: int, network: Transformer = network, kernel: AttentionKernel = kernel) -> Tensor:
            rows = text(step)
            return cross_entropy(network(rows[:, :-1], kernel=kernel), rows[:, 1:])

        found["curves"][name] = train(network, loss_of, num_steps=run.size(NUM_STEPS, 4))
        with torch.no_grad():
            found["trained"][name] = cross_entropy(network(unseen[:, :-1], kernel=kernel), unseen[:, 1:]).item()
        found["token_by_token"][name], found["unrelated"][name] = _losses_token_by_token(network, kernel, unseen)
    q, k, v = torch.randn(3, 8, 4, LENGTH, 8, generator=random_generator(run.seed)).unbind()
    first, divided = (KERNELS[name](q, k, v, Scoring(Mask(causal=True), 1.0)) for name in HONEST)
    return found | {"difference": (first - divided).abs().max().item()}


def _holds(found: Measurements) -> bool:
    trained, stepwise, unrelated = found["trained"], found["token_by_token"], found["unrelated"]
    honest = all(abs(trained[name] - stepwise[name]) < 1e-4 for name in HONEST)
    leaks = all(trained[name] < 0.5 * CHANCE < 0.98 * CHANCE < stepwise[name] for name in ("after softmax", "no mask"))
    blind = all(abs(stepwise[name] / unrelated[name] - 1) < 0.03 for name in KERNELS)
    return honest and leaks and blind and found["difference"] < 1e-5


def _conclude(results: Sequence[Measurements]) -> str:
    trained, stepwise = (mean([found[kind]["after softmax"] for found in results]) for kind in list(KINDS.values())[:2])
    return (
        f"masking after the softmax leaks the future: the loss trains to {trained:.2f} and is "
        f"{stepwise:.3f} token by token (chance {CHANCE:.3f}); renormalizing the rows "
        f"removes the leak and equals masking first (outputs differ by {max(f['difference'] for f in results):.0e})"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = {name: [[found[kind][name] for kind in KINDS.values()] for found in results] for name in KERNELS}
    return spread_table("mask", list(KINDS), rows, digits=4)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    curves, bars = figure.subplots(1, 2)
    for color, name in zip(COLORS, KERNELS, strict=False):
        rows = [found["curves"][name] for found in results]
        line = "--" if name == "after, renormalized" else "-"  # it hides no other line that way
        plot_spread(curves, range(len(rows[0])), rows, label=name, color=color, linewidth=1, linestyle=line)
    groups = {"in one pass": "trained", "token by token": "token_by_token"}
    values = {label: [[found[kind][name] for found in results] for name in KERNELS] for label, kind in groups.items()}
    bar_spread(bars, [name.replace(" ", "\n", 1) for name in KERNELS], values)
    for axes in (curves, bars):
        axes.axhline(CHANCE, color="black", linestyle=":", linewidth=1, label="chance")
    finish_axes(curves, title="Training on random letters", x="step", y="loss (nats)")
    finish_axes(bars, title="The trained networks on unseen text", y="loss (nats)", ylim=(0, None))


STUDY = Study(
    entry=ENTRIES["mask"],
    claim="""A causal mask sets the scores of later tokens to −∞ before the softmax (A5). The lecture asks whether
        one may also set the weights to 0 after the softmax, and suspects that this "may just work". Without any
        mask, the network copies the next token (D2).""",
    setup=f"""Random text of {NUM_LETTERS} letters cannot be predicted: no honest model has a loss below ln
        {NUM_LETTERS} = {CHANCE:.3f}. Four equal networks with two layers train on it for {NUM_STEPS} steps. They
        differ only in the attention kernel. Then each reads unseen text twice: in one pass, as in training, and
        token by token with a cache, as in generation, where later tokens do not exist. The last column of the table
        compares the second reading with all letters instead of the next: equal numbers show that it knows nothing.""",
    explanation=f"""After a softmax over all tokens, the weight of token j in row i is exp(s_ij) / Σ_k exp(s_ik), and
        the sum runs over k > i too. Setting the weights of later tokens to 0 does not change the others, so every
        weight that remains contains the later tokens in its denominator. A head learns scores that depend on the
        letter of the next token; the size of its output then tells that letter, and the next layers read it off.

        Dividing a masked row by its sum cancels the denominator: exp(s_ij) / Σ_(k ≤ i) exp(s_ik) is the softmax over
        the tokens up to i, exactly what masking first computes.

        The last token of a text has no successor, so the best leak has a loss of {CHANCE / LENGTH:.3f} in one pass,
        {CHANCE:.3f} / {LENGTH}. Token by token, every token is the last: there is nothing to read off, and an even
        guess, at chance, is the best. Without a mask, the guesses are uneven and cost more, but they know no more of
        the next letter: their loss is nearly the mean of −ln p over all letters, right or wrong (last column).""",
    limits="""Two layers and four letters show that the leak exists and is easy to learn. On real text a network
        mixes it with honest prediction, so the training loss looks better by an amount that depends on the text.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
)
