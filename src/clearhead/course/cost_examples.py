"""Worked examples of part F of the book: the cost tables in its letters, with a counter's numbers (F1 to F5).

    for example in cost_examples(): print(example.title)

b is the batch, n the length, d the width and m the number of heads; the feed-forward is 4d wide.
"""

import math
from dataclasses import replace
from typing import Literal

import torch

from clearhead.architecture import Embedding as EmbeddingConfig
from clearhead.architecture import FeedForward, GroupedAttention, Head, Layer, LayerNorm, ModelConfig, Stack
from clearhead.cache import ContiguousStore, KeyValueCache, forward_step
from clearhead.costs import KernelCounter, Workload, find_device, operation_costs
from clearhead.course.parts import NO_MASK, Chart, Example, Part, TextTable, step_context
from clearhead.families import preset
from clearhead.model import Attention, AttentionContext, Transformer, reference_attention

_SIZES = {"b": 2, "n": 48, "d": 32, "m": 4}
_SEQUENCE = {  # operation -> FLOPs, numbers read and written; matrix products of each
    "Q, K, V": ("6 b n d d", "3 d d + 6 b n d", 3),
    "scores": ("2 b n n d", "2 b n d + b m n n", 1),
    "weighted sum": ("2 b n n d", "2 b n d + b m n n", 1),
    "output": ("2 b n d d", "2 b n d + d d", 1),
    "feed-forward": ("16 b n d d", "10 b n d + 8 d d", 2),
}
_TOKEN = {
    "Q, K, V": ("6 b d d", "3 d d + 6 b d", 3),
    "scores": ("2 b n d", "b n d + b d + b m n", 1),
    "weighted sum": ("2 b n d", "b n d + b d + b m n", 1),
    "output": ("2 b d d", "2 b d + d d", 1),
    "feed-forward": ("16 b d d", "10 b d + 8 d d", 2),
}
_KINDS = {  # attention with its projections -> multiply-accumulates
    "self, not causal": "4 n d d + 2 n n d",
    "multi-query": "2 n d d + 2 n d e + 2 n n d",
    "cross": "2 k d d + 2 n d d + 2 n k d",
    "causal self": "4 n d d + n n d + n d",
}
_LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_PHASES: tuple[tuple[Literal["prefill", "decode"], int], ...] = (("prefill", 1), ("decode", 1), ("decode", 64))
_DEVICE, _MODEL, _CONTEXT = "h200", "llama-3.1-8b", 4096


def cost_examples() -> list[Example]:
    """Compute the examples of F1 to F5."""
    tables = [_layer_table(one_token=False), _layer_table(one_token=True)]
    return [_matrix_product(), *tables, _kinds_of_attention(), _growth(), _intensity()]


def _evaluate(formula: str, sizes: dict[str, int]) -> int:
    """Return the value of a sum of products such as `2 b n d + d d`."""
    return sum(math.prod(int(sizes.get(part, part)) for part in term.split()) for term in formula.split(" + "))


def _typeset(formula: str) -> str:
    """Return a formula as the book writes it: `2 b n d + d d` becomes `2bnd + d²`."""
    return formula.replace("d d", "d²").replace("n n", "n²").replace(" + ", "+").replace(" ", "").replace("+", " + ")


def _matrix_product() -> Example:
    n, m, k = 5, 16, 24
    with KernelCounter() as counter:
        torch.ones(n, m) @ torch.ones(m, k)
    product = next(kernel for kernel in counter.kernels if kernel.flops)
    rows = [
        ("FLOPs: 2nmk", f"{2 * n * m * k:,}", f"{product.flops:,}"),
        ("read A: nm", f"{n * m:,}", ""),
        ("read B: mk", f"{m * k:,}", ""),
        ("write AB: nk", f"{n * k:,}", ""),
        ("numbers moved: nm + mk + nk", f"{n * m + m * k + n * k:,}", f"{product.num_bytes // 4:,}"),
    ]
    explanation = f"A is n × m, B is m × k, with n = {n}, m = {m}, k = {k}. A counter below PyTorch's operators agrees."
    table = TextTable("one matrix product", ("quantity", "by formula", "counted"), rows)
    return Example("F1", "One matrix product, counted", explanation, [table])


def _one_layer() -> Transformer:
    """Return a decoder with one layer of the sizes of the tables."""
    layer = Layer(
        attention=GroupedAttention(
            num_heads=_SIZES["m"], num_kv_heads=_SIZES["m"], head_width=_SIZES["d"] // _SIZES["m"]
        ),
        feed_forward=FeedForward(width=4 * _SIZES["d"], activation="relu"),
        norm=LayerNorm(epsilon=1e-5),
    )
    stack = Stack(embedding=EmbeddingConfig(vocab_size=8), layers=(layer,))
    config = ModelConfig(width=_SIZES["d"], context=_SIZES["n"], decoder=stack, head=Head())
    return Transformer(config).eval()


def _layer_table(*, one_token: bool) -> Example:
    """Count FLOPs and numbers moved of each operation of a layer, beside the formulas."""
    network, tokens = _one_layer(), torch.zeros(_SIZES["b"], _SIZES["n"], dtype=torch.long)
    cache = KeyValueCache(network.config) if one_token else None
    if cache is not None:
        forward_step(network, tokens[:, :-1], cache)
    with KernelCounter() as counter:
        network.hidden_states(tokens[:, -1:] if one_token else tokens, cache=cache, kernel=reference_attention)
    products = iter([kernel for kernel in counter.kernels if kernel.flops])
    rows, totals = [], [0, 0, 0, 0]
    for name, (flops, moved, num_products) in (_TOKEN if one_token else _SEQUENCE).items():
        kernels = [next(products) for _ in range(num_products)]
        numbers = [
            _evaluate(flops, _SIZES),
            sum(kernel.flops for kernel in kernels),
            _evaluate(moved, _SIZES),
            sum(kernel.num_bytes for kernel in kernels) // 4,
        ]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        first, second, third, fourth = (f"{number:,}" for number in numbers)
        rows.append((name, _typeset(flops), first, second, _typeset(moved), third, fourth))
    first, second, third, fourth = (f"{number:,}" for number in totals)
    rows.append(("total", "", first, second, "", third, fourth))
    columns = ("operation", "FLOPs", "by formula", "counted", "numbers moved", "by formula", "counted")
    what = "one token with a cache of n" if one_token else "a whole sequence"
    sizes = ", ".join(f"{letter} = {size}" for letter, size in _SIZES.items())
    explanation = (
        f"One layer, {what}; {sizes}, d_ff = 4d, no causal saving, scores written and read again. The counter runs the "
        "layer and adds up what its matrix products compute and move."
    )
    title = "The table for one token" if one_token else "The table for a sequence"
    return Example("F3" if one_token else "F2", title, explanation, [TextTable("one layer", columns, rows)])


def _kinds_of_attention() -> Example:
    """Count the multiply-accumulates of four kinds of attention over n source and m target tokens."""
    n, m, d, h = 24, 10, 32, 4
    sizes = {"n": n, "k": m, "d": d, "e": d // h}
    counted = []
    for kind in _KINDS:
        num_kv_heads = 1 if kind == "multi-query" else h
        attention = Attention(GroupedAttention(num_heads=h, num_kv_heads=num_kv_heads, head_width=d // h), d)
        x, context = torch.zeros(1, n, d), AttentionContext(NO_MASK, reference_attention, torch.arange(n)[None])
        with KernelCounter() as counter:
            if kind == "causal self":  # token by token: only the pairs that the mask allows
                store = ContiguousStore()
                for step in range(n):
                    attention(x[:, :1], replace(step_context(step, store), kernel=reference_attention))
            elif kind == "cross":
                attention(torch.zeros(1, m, d), context, x)
            else:
                attention(x, context)
        counted.append(counter.flops // 2)
    rows = [
        (
            kind,
            _typeset(formula).replace("de", "d²/h").replace("k", "m"),
            f"{_evaluate(formula, sizes):,}",
            f"{count:,}",
        )
        for (kind, formula), count in zip(_KINDS.items(), counted, strict=True)
    ]
    explanation = (
        f"One layer with h = {h} heads, together d = {d} wide; n = {n} tokens, and for cross-attention m = {m} target "
        "tokens that read n source tokens. Terms with d² are the projections, the others scores and weighted sum."
    )
    table = TextTable("multiply-accumulates", ("attention", "formula", "value", "counted"), rows)
    return Example("F4", "Four kinds of attention", explanation, [table])


def _growth() -> Example:
    d, m = 512, 64  # the width, and the target length of cross-attention
    lines = {
        "self-attention: n²d": [float(n * n * d) for n in _LENGTHS],
        "recurrent: nd²": [float(n * d * d) for n in _LENGTHS],
        "cross-attention: nmd": [float(n * m * d) for n in _LENGTHS],
    }
    rows = [
        (name, *(f"{line[_LENGTHS.index(n)]:.3g}" for n in (64, 512, 4096)), steps)
        for (name, line), steps in zip(lines.items(), ("1", "n", "1"), strict=True)
    ]
    columns = ("per layer", "n = 64", "n = 512", "n = 4096", "steps one after the other")
    explanation = f"d = {d}, target length m = {m}. Self-attention is cheaper than recurrence while n < d."
    panels: list[Part] = [
        TextTable("work and sequential steps", columns, rows),
        Chart("work over n", _LENGTHS, dict(lines), x_label="n", log_x=True, log_y=True),
    ]
    return Example("F4", "How the work grows", explanation, panels)


def _intensity() -> Example:
    device = find_device(_DEVICE)
    balance = device.peak("bfloat16") / device.bytes_per_second  # FLOPs in the time of moving one byte
    rows = []
    for phase, batch in _PHASES:
        workload = Workload(config=preset(_MODEL), phase=phase, batch=batch, context=_CONTEXT, source=_CONTEXT)
        operations = operation_costs(workload)
        flops, num_bytes = sum(each.flops for each in operations), sum(each.num_bytes for each in operations)
        limit = "compute" if flops / num_bytes > balance else "memory"
        rows.append((f"{phase}, batch {batch}", f"{flops:.3g}", f"{num_bytes:.3g}", f"{flops / num_bytes:.3g}", limit))
    columns = (_MODEL, "FLOPs", "bytes", "FLOPs per byte", "bound by")
    explanation = (
        f"{_CONTEXT} tokens in bfloat16. An {_DEVICE.upper()} can do {balance:.0f} FLOPs "
        "in the time of moving one byte; a phase below that waits for memory."
    )
    return Example("F5", "Arithmetic intensity", explanation, [TextTable("two phases", columns, rows)])
