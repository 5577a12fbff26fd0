"""Study: sharing keys and values among heads, and how many tokens an argmax network sees (book A7, A9, A10).

clearhead study heads
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from clearhead.api import cost
from clearhead.architecture import Bidirectional, ModelConfig, Rope
from clearhead.model import Scoring, Transformer, attention_steps
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import mean, spread_table
from clearhead.studies.pictures import COLORS, Figure, finish_axes
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, cross_entropy, english_text, random_generator, text_rows, toy_decoder, train

NUM_HEADS, WIDTH, NUM_LAYERS, LENGTH, NUM_STEPS = 8, 32, 2, 48, 300
KINDS = {"MHA (8 of 8)": 8, "GQA (4 of 8)": 4, "GQA (2 of 8)": 2, "MQA (1 of 8)": 1}
FIELD_HEADS, FIELD_LEVELS, FIELD_LENGTH = (1, 2, 4), (1, 2, 3), 512


def _config(shared: int, vocab_size: int) -> ModelConfig:
    """Return a decoder with this number of key-value heads."""
    return toy_decoder(
        vocab_size=vocab_size, width=WIDTH, num_heads=NUM_HEADS, num_kv_heads=shared, context=LENGTH, position=Rope()
    )


def _argmax_attention(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """Attention that gives all of its weight to the key with the largest score."""
    weights = attention_steps(q, k, v, scoring).weights
    return functional.one_hot(weights.argmax(dim=-1), weights.shape[-1]).to(v.dtype) @ v


def _receptive_field(num_heads: int, num_layers: int, seed: int, num_outputs: int) -> int:
    """Return the largest number of inputs on which one of the outputs of an argmax network depends."""
    everywhere = Bidirectional()
    config = toy_decoder(vocab_size=2, width=32, num_layers=num_layers, num_heads=num_heads, pattern=everywhere)
    network = build(config, seed)
    x = torch.randn(1, FIELD_LENGTH, 32, generator=random_generator(seed)).requires_grad_()
    assert network.decoder is not None
    network.decoder.embedding.register_forward_hook(lambda module, inputs, output: x)
    output = network.hidden_states(torch.zeros(1, FIELD_LENGTH, dtype=torch.long), kernel=_argmax_attention)
    largest = 0
    for row in range(num_outputs):  # the choice of keys has no gradient, so only tokens that were read have one
        (gradient,) = torch.autograd.grad(output[0, row].sum(), x, retain_graph=True)
        largest = max(largest, int((gradient[0].abs().amax(dim=-1) > 0).sum()))
    return largest


def _measure(run: Run) -> Measurements:
    text, vocab_size = english_text()
    boundary = len(text) * 9 // 10
    unseen = text_rows(text[boundary:], run.size(128, 2), LENGTH, random_generator(run.seed))
    found: Measurements = {"loss": {}, "bytes": {}, "flops": {}}
    for name, num_kv_heads in run.each(KINDS.items(), lambda item: item[0]):
        config = _config(num_kv_heads, vocab_size)
        network = build(config, run.seed)

        def loss_of(step: int, network: Transformer = network) -> Tensor:
            rows = text_rows(text[:boundary], 12, LENGTH, random_generator(run.seed, step))
            return cross_entropy(network(rows[:, :-1]), rows[:, 1:])

        train(network, loss_of, num_steps=run.size(NUM_STEPS, 2), learning_rate=5e-3)
        with torch.no_grad():
            found["loss"][name] = cross_entropy(network(unseen[:, :-1]), unseen[:, 1:]).item()
        found["bytes"][name] = cost(config, phase="decode").cache_bytes_per_token
        found["flops"][name] = cost(config, phase="prefill").flops
    levels, num_outputs = FIELD_LEVELS[: run.size(3, 1)], run.size(48, 4)
    found["field"] = {
        str(num_heads): [_receptive_field(num_heads, level, run.seed, num_outputs) for level in levels]
        for num_heads in FIELD_HEADS
    }
    return found


def _saved_by_sharing(num_kv_heads: int) -> int:
    """Return the FLOPs that fewer key-value heads save in the projections of a text: 4·n·d·(d/h) per head left out."""
    return NUM_LAYERS * 2 * 2 * LENGTH * WIDTH * (WIDTH // NUM_HEADS) * (NUM_HEADS - num_kv_heads)


def _holds(found: Measurements) -> bool:
    full, *_, single = KINDS
    close = found["loss"][single] < found["loss"][full] + 0.15
    smaller = found["bytes"][single] * NUM_HEADS == found["bytes"][full]
    saved = all(found["flops"][full] - found["flops"][name] == _saved_by_sharing(KINDS[name]) for name in KINDS)
    fields = [(size, (int(h) + 1) ** n) for h, sizes in found["field"].items() for n, size in enumerate(sizes, start=1)]
    return close and smaller and saved and all(0.6 * bound <= size <= bound for size, bound in fields)


def _conclude(results: Sequence[Measurements]) -> str:
    full, *_, single = KINDS
    losses = [mean([found["loss"][name] for found in results]) for name in (full, single)]
    largest = max(found["field"]["4"][-1] for found in results)
    return (
        f"one shared key-value head needs {NUM_HEADS} times less cache and changes the loss from {losses[0]:.3f} to "
        f"{losses[1]:.3f}; after {FIELD_LEVELS[-1]} levels of argmax attention with 4 heads an output depends on up to "
        f"{largest} inputs, at most 5³ = 125"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    kinds = ("loss", "bytes", "flops")
    rows = {name: [[found[kind][name] for kind in kinds] for found in results] for name in KINDS}
    return spread_table("heads", ["loss", "bytes of cache per token", "FLOPs of a text"], rows, digits=4)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    by_bytes, by_flops, field = figure.subplots(1, 3)
    for axes, kind, x in ((by_bytes, "bytes", "bytes of cache per token"), (by_flops, "flops", "FLOPs of a text")):
        for number, found in enumerate(results):  # a line per seed: the seeds have texts of their own
            sizes, losses = ([found[each][name] for name in KINDS] for each in (kind, "loss"))
            axes.plot(sizes, losses, "o-", color=COLORS[number], label=f"seed {number + 1} of {len(results)}")
        for name, num_kv_heads in KINDS.items():
            axes.annotate(f" {num_kv_heads}", (results[0][kind][name], results[0]["loss"][name]), fontsize=8)
        finish_axes(axes, title="Loss with 1, 2, 4 and 8 key-value heads", x=x, y="loss (nats)", legend=kind == "bytes")
    for color, heads in zip(COLORS, FIELD_HEADS, strict=False):
        sizes = [max(column) for column in zip(*(found["field"][str(heads)] for found in results), strict=True)]
        levels = FIELD_LEVELS[: len(sizes)]
        field.plot(levels, sizes, "o", color=color, label=f"h = {heads}, measured")
        field.plot(levels, [(heads + 1) ** level for level in levels], ":", color=color, label=f"({heads} + 1)ⁿ")
    finish_axes(field, title="Receptive field", x="levels n", y="inputs", yscale="log", ticks=FIELD_LEVELS)


STUDY = Study(
    entry=ENTRIES["heads"],
    claim="""Heads of width d/h cost about as much as one head of width d. One key and value for all heads (MQA)
        saves projections and cache, and groups of heads (GQA) are in between (A7). If each of h heads attends to a
        single token, an output depends on at most (h + 1)ⁿ inputs after n levels (A9).""",
    setup=f"""Four networks with {NUM_HEADS} query heads and {", ".join(map(str, KINDS.values()))} key-value heads
        learn English text for {NUM_STEPS} steps; bytes and FLOPs are those of `clearhead cost`. The receptive field
        is that of random networks with argmax attention over {FIELD_LENGTH} tokens: the number of inputs with a
        gradient.""",
    explanation="""The cache holds keys and values only, so its size is proportional to the key-value heads; the
        projections of keys and values shrink alike, and scores and feed-forward do not change. In an argmax network
        a token reads itself (the residual) and one token per head, so every level multiplies what it depends on by
        at most h + 1. It is fewer where two heads choose the same token.""",
    limits="""The networks are too small to show the loss of quality that large models have with a single key-value
        head; differences here are about as large as those between seeds.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(13.0, 4.0),
)
