"""Study: the book's cost tables in its own letters, with a counter's number beside every entry (book F1 to F5).

clearhead study tables
"""

from collections.abc import Sequence

import torch

from clearhead.architecture import Rope
from clearhead.cache import KeyValueCache, forward_step
from clearhead.costs import KernelCounter, find_device
from clearhead.model import Transformer, fused_attention, reference_attention
from clearhead.studies.catalog import ENTRIES
from clearhead.studies.numbers import evaluate_rows, fit_slope, mean, typeset_formula
from clearhead.studies.pictures import COLORS, Figure, finish_axes, plot_roofline
from clearhead.studies.study import Measurements, Run, Study, Table
from clearhead.studies.toys import build, build_recurrent, random_generator, toy_decoder, toy_recurrent

TABLES = {  # operation -> FLOPs, and numbers read and written, as sums of products
    "whole sequence": {
        "Q, K, V": ("6 b n d d", "3 d d + 6 b n d"),
        "scores": ("2 b n n d", "2 b n d + b m n n"),
        "weighted sum": ("2 b n n d", "2 b n d + b m n n"),
        "output": ("2 b n d d", "2 b n d + d d"),
        "feed-forward": ("16 b n d d", "10 b n d + 8 d d"),
        "attention, fused": ("4 b n n d", "4 b n d + b m n"),
    },
    "one token": {
        "Q, K, V": ("6 b d d", "3 d d + 6 b d"),
        "scores": ("2 b n d", "b n d + b d + b m n"),
        "weighted sum": ("2 b n d", "b n d + b d + b m n"),
        "output": ("2 b d d", "2 b d + d d"),
        "feed-forward": ("16 b d d", "10 b d + 8 d d"),
        "attention, fused": ("4 b n d", "2 b n d + 2 b d + b m"),
    },
}
TOTALS = {  # the kernels of each operation, in the order in which they run
    "total": {"Q, K, V": 3, "scores": 1, "weighted sum": 1, "output": 1, "feed-forward": 2},
    "total, fused": {"Q, K, V": 3, "attention, fused": 1, "output": 1, "feed-forward": 2},
}
SIZES = {"b": 2, "n": 96, "d": 64, "m": 4}
BATCH, LENGTH, WIDTH, HEADS = SIZES.values()
REAL_SIZES = {"b": 1, "n": 4096, "d": 4096, "m": 32}  # of the roofline: a model of 7 billion parameters
EXPECTED = {table: evaluate_rows(rows, SIZES) for table, rows in TABLES.items()}
GROWTH = {"self-attention": "1 sequential step", "recurrent": "n sequential steps"}
LENGTHS, FLOAT_BYTES, HALF_BYTES, DEVICE = (64, 128, 256, 512), 4, 2, "h200"


def _build(seed: int) -> Transformer:
    return build(toy_decoder(vocab_size=64, width=WIDTH, num_layers=1, num_heads=HEADS, position=Rope()), seed).eval()


@torch.no_grad()
def _count_layer(seed: int, one_token: bool) -> dict[str, list[int]]:
    """Run one layer and return the FLOPs and moved numbers of each operation, as counted below PyTorch's operators."""
    network, tokens = _build(seed), torch.randint(0, 64, (BATCH, LENGTH), generator=random_generator(seed))
    cache = KeyValueCache(network.config) if one_token else None
    if cache is not None:
        forward_step(network, tokens[:, :-1], cache)
    counted = {}
    for attention, order in zip((reference_attention, fused_attention), TOTALS.values(), strict=True):
        with KernelCounter() as counter:
            network.hidden_states(tokens[:, -1:] if one_token else tokens, cache=cache, kernel=attention)
        products = iter([kernel for kernel in counter.kernels if kernel.flops])
        for name, number in order.items():
            kernels = [next(products) for _ in range(number)]
            counted[name] = [sum(one.flops for one in kernels), sum(one.num_bytes for one in kernels) // FLOAT_BYTES]
    return counted


@torch.no_grad()
def _count_growth(seed: int) -> dict[str, list[int]]:
    """Return the FLOPs of an attention layer's scores and of a recurrent layer for each of LENGTHS."""
    recurrent = build_recurrent(toy_recurrent(vocab_size=64, width=WIDTH, cell="tanh"), seed)
    network, scores, recurrence = _build(seed), [], []
    for length in LENGTHS:
        tokens = torch.zeros(1, length, dtype=torch.long)
        with KernelCounter() as counter:
            network.hidden_states(tokens, kernel=reference_attention)
        scores.append(sum(kernel.flops for kernel in counter.kernels if kernel.name == "bmm"))
        with KernelCounter() as counter:
            recurrent.encode(tokens)
        recurrence.append(counter.flops)
    return dict(zip(GROWTH, (scores, recurrence), strict=True))


def _measure(run: Run) -> Measurements:
    counted = {name: _count_layer(run.seed, one_token=name == "one token") for name in run.each(TABLES)}
    return {"counted": counted, "growth": _count_growth(run.seed)}


def _holds(found: Measurements) -> bool:
    attention, recurrent = (fit_slope(LENGTHS, counts) for counts in found["growth"].values())
    return found["counted"] == EXPECTED and abs(attention - 2) < 0.01 and abs(recurrent - 1) < 0.01


def _conclude(results: Sequence[Measurements]) -> str:
    scores, recurrent = (mean([fit_slope(LENGTHS, found["growth"][name]) for found in results]) for name in GROWTH)
    return (
        "all entries of both tables, fused and not, equal what a counter finds; scores grow like "
        f"n^{scores:.2f} in one sequential step, a recurrent layer like n^{recurrent:.2f} in n steps"
    )


def _tabulate(results: Sequence[Measurements]) -> Table:
    rows = []
    for table, operations in TABLES.items():
        numbers = {name: [*EXPECTED[table][name], *results[0]["counted"][table][name]] for name in operations}
        for total, parts in TOTALS.items():
            numbers[total] = [sum(column) for column in zip(*(numbers[name] for name in parts), strict=True)]
        for name, row in numbers.items():
            flops, moved = (typeset_formula(formula) for formula in operations.get(name, ("", "")))
            first, second, third, fourth = (f"{number:,}" for number in row)
            rows.append((f"{table}: {name}", flops, first, third, moved, second, fourth))
    return Table(("operation", "FLOPs", "value", "counted", "numbers moved", "value", "counted"), rows)


def _draw(figure: Figure, results: Sequence[Measurements]) -> None:
    roofline, growth = figure.subplots(1, 2, width_ratios=(1.5, 1))
    device, intensities = find_device(DEVICE), {}
    for table, operations in TABLES.items():
        for name, (flops, moved) in evaluate_rows(operations, REAL_SIZES).items():
            intensities[f"{table}: {name}"] = flops / (HALF_BYTES * moved)
    plot_roofline(roofline, device.peak("bfloat16"), device.bytes_per_second, intensities)
    finish_axes(roofline, title="TFLOP/s of an H200, n = d = 4096", x="FLOPs per byte", xscale="log", yscale="log")
    for color, (name, steps) in zip(COLORS, GROWTH.items(), strict=False):
        growth.plot(LENGTHS, results[0]["growth"][name], "o-", color=color, label=f"{name}: {steps}")
    finish_axes(growth, title="FLOPs counted for one layer", x="length n", xscale="log", yscale="log", ticks=LENGTHS)


STUDY = Study(
    entry=ENTRIES["tables"],
    claim="""A product of n×m and m×k takes 2nmk FLOPs and moves nm + mk + nk numbers (F1). This gives tables for a
        whole sequence (F2) and for one token (F3), the growth with the length (F4) and arithmetic intensity (F5).""",
    setup=f"""One layer with b = {BATCH} sequences of n = {LENGTH} tokens, width d = {WIDTH}, m = {HEADS} heads and a
        feed-forward of 4d runs under a counter of matrix products. Each entry must equal the count exactly.""",
    explanation="""The score matrix is the term bmn²: a fused kernel keeps it in fast memory and writes only the
        logarithm of each row's denominator, bmn numbers. A decoded token reads every weight and cached number for one
        multiplication each: its intensity is near 1 FLOP per byte, hundreds of times below what a GPU needs, so
        memory limits it. Self-attention has one sequential step per layer, a recurrent layer n.""",
    limits="""Norms, softmax and activations are left out, as in the book. `clearhead cost` prints the tables for any
        model and device; the roofline is an upper limit.""",
    measure=_measure,
    holds=_holds,
    conclude=_conclude,
    tabulate=_tabulate,
    draw=_draw,
    figure_size=(12.0, 5.0),
)
