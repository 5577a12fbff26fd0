"""The worked examples of the book, computed by the network's own parts as they are asked for.

    for example in worked_examples(): print(example.title, [panel.name for panel in example.panels])

Their inputs stand in assets/book.json; nothing that comes out is stored. All in float64.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.architecture import GroupedAttention, SinusoidalPositions
from clearhead.cache import ContiguousStore
from clearhead.inspection.document import asset
from clearhead.model import (
    Attention,
    AttentionContext,
    AttentionSteps,
    Mask,
    Scoring,
    attention_steps,
    fused_attention,
    masked_softmax,
    sinusoids,
)

ALL = Mask()


@dataclass(frozen=True)
class Panel:
    """One matrix of an example, as plain numbers or as a heatmap."""

    name: str
    values: Tensor
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    kind: Literal["numbers", "scores", "weights"] = "numbers"
    allowed: Tensor | None = None  # None: nothing is masked


@dataclass(frozen=True)
class Example:
    statement: str  # of the book: A1, …
    title: str
    words: str
    panels: list[Panel]


@torch.no_grad()
def worked_examples() -> list[Example]:
    makers: list[Callable[[], Example]] = [
        one_head,
        two_keys,
        alignment,
        causal_mask,
        *(partial(heatmap_example, name) for name in inputs("heatmaps")),
        temperature,
        receptive_field,
        sinusoidal,
        counting_without_positions,
        cached_decoding,
        key_projections,
    ]
    return [make() for make in makers]


@cache
def book() -> dict[str, Any]:
    return dict(json.loads(asset("book.json")))


def inputs(example: str) -> dict[str, Any]:
    return dict(book()[example])


def tensor(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def head_with(w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Attention:
    """One head with these matrices, written x·W, whose output is given out as it is."""
    width, head, value = *w_q.shape, w_v.shape[1]
    config = GroupedAttention(num_heads=1, num_kv_heads=1, head_width=head, value_width=value)
    attention = Attention(config, width).double()
    for linear, matrix in ((attention.query, w_q), (attention.key, w_k), (attention.value, w_v)):
        linear.weight.copy_(matrix.T)
    attention.output.weight.copy_(torch.eye(width, value))
    return attention


def attend_to(scores: Tensor, mask: Mask = ALL, scale: float = 1.0) -> AttentionSteps:
    """Our kernel on scores (T, S) as they are: the queries are the scores, keys and values the unit vectors."""
    unit = torch.eye(scores.shape[-1], dtype=scores.dtype)[None, None]
    return attention_steps(scores[None, None], unit, unit, Scoring(mask=mask, scale=scale))


def one_head() -> Example:
    given = {name: tensor(rows) for name, rows in inputs("one_head").items()}
    attention, x = head_with(given["W_q"], given["W_k"], given["W_v"]), given["x"][None]
    q, k, v = (attention.heads(linear, x, num_heads=1) for linear in (attention.query, attention.key, attention.value))
    steps = attention_steps(q, k, v, Scoring(mask=ALL, scale=1.0))
    panels = [Panel(name, given[name]) for name in ("x", "W_q", "W_k", "W_v")]
    panels += [Panel(f"{name} = x·W_{name}", part[0, 0]) for name, part in (("q", q), ("k", k), ("v", v))]
    panels += [
        Panel("scores = q·kᵀ", steps.scores[0, 0]),
        Panel("weights = softmax(scores)", steps.weights[0, 0], kind="weights"),
        Panel("output = weights·v", steps.output[0, 0]),
    ]
    words = (
        "Three tokens of width 2. Each is projected three times: what it looks for, how it can be found, what it hands "
        "over. Entry (i, j) of the scores is query i times key j; a row of weights sums to one and mixes the values. "
        "The scores are left unscaled here."
    )
    return Example("A1, A2", "One head, from tokens to output", words, panels)


def two_keys() -> Example:
    given = inputs("two_keys")
    q = torch.zeros(1, 1, 1, given["width"], dtype=torch.float64)
    q[..., : len(given["query"])] = tensor(given["query"])
    k = torch.eye(len(given["query"]), given["width"], dtype=torch.float64)[None, None]
    steps = attention_steps(q, k, k, Scoring(mask=ALL, scale=given["width"] ** -0.5))
    panels = [
        Panel("q·kᵀ", tensor([given["query"]])),
        Panel("scores = q·kᵀ / √d", steps.scores[0, 0]),
        Panel("weights", steps.weights[0, 0], kind="weights"),
    ]
    words = f"Width {given['width']}, so products are divided by {given['width'] ** 0.5:g} before the softmax."
    return Example("A2, A3", "Two keys and the scale", words, panels)


def alignment() -> Example:
    states, state = tensor(inputs("alignment")["encoder_states"]), tensor(inputs("alignment")["decoder_state"])
    steps = attention_steps(state[None, None, None], states[None, None], states[None, None], Scoring(ALL, scale=1.0))
    panels = [
        Panel("encoder states h", states),
        Panel("decoder state s", state[None]),
        Panel("scores = s·h", steps.scores[0, 0]),
        Panel("weights", steps.weights[0, 0], kind="weights"),
        Panel("context = Σ weight·h", steps.output[0, 0]),
    ]
    words = (
        "A recurrent decoder asks which states of the encoder matter now. The context it gets is their mean under the "
        "weights, so no single last state has to hold the whole sentence."
    )
    return Example("A4", "Alignment between decoder and encoder", words, panels)


def causal_mask() -> Example:
    scores = tensor(inputs("causal")["scores"])
    allowed = torch.ones_like(scores, dtype=torch.bool).tril()
    steps = attend_to(scores, Mask(causal=True))
    late = masked_softmax(scores, None) * allowed
    panels = [
        Panel("scores", scores, kind="scores"),
        Panel("after the mask", scores.masked_fill(~allowed, -torch.inf), kind="scores", allowed=allowed),
        Panel("weights", steps.weights[0, 0], kind="weights", allowed=allowed),
        Panel("row sums", torch.stack((steps.weights[0, 0].sum(-1), late.sum(-1))), rows=("mask first", "mask last")),
    ]
    words = (
        "A token may look at itself and back. The mask comes before the softmax: every row then sums to one. Masking "
        "the finished weights instead leaves rows that sum to less, as the last table shows."
    )
    return Example("A5", "The causal mask", words, panels)


HEATMAPS = {
    "A": ("uniform", "All scores are equal, so every token looks everywhere alike."),
    "B": ("diagonal", "One score in each row stands out by 9, and the softmax gives it nearly everything."),
    "C": ("causal", "Equal scores under the causal mask: each row shares its weight among the tokens so far."),
    "D": ("shifted", "Each token may look at one other only, the next, and the last at the first."),
}


def heatmap_example(name: str) -> Example:
    given = inputs("heatmaps")[name]
    scores = tensor([[-torch.inf if cell is None else cell for cell in row] for row in given])
    allowed = scores.isfinite()
    weights = attend_to(scores.masked_fill(~allowed, 0.0), Mask(allowed)).weights[0, 0]
    shape, words = HEATMAPS[name]
    panels = [
        Panel("scores", scores, kind="scores", allowed=allowed),
        Panel("weights", weights, kind="weights", allowed=allowed),
    ]
    return Example("A6", f"Heatmap {name}: {shape}", words, panels)


def temperature() -> Example:
    row, temperatures = tensor([inputs("temperature")["row"]]), inputs("temperature")["temperatures"]
    weights = [attend_to(row, scale=1 / each).weights[0, 0, 0] for each in temperatures]
    panels = [
        Panel("scores", row),
        Panel("weights", torch.stack(weights), rows=[f"T = {each:g}" for each in temperatures], kind="weights"),
    ]
    words = "Scores divided by a temperature: towards 0 the largest takes all, towards infinity all get the same."
    return Example("A6", "Temperature", words, panels)


def receptive_field() -> Example:
    """Argmax attention with a residual: a node reads itself and `heads` others, here always new ones."""
    heads, levels = inputs("receptive_field")["heads"], inputs("receptive_field")["levels"]

    def seen(num_heads: int, num_levels: int) -> int:
        reached = {0}
        for _ in range(num_levels):
            span = len(reached)
            reached = {place + head * span for place in reached for head in range(num_heads + 1)}
        return len(reached)

    sizes = tensor([[seen(count, level) for level in levels] for count in heads])
    rows, columns = [f"h = {count}" for count in heads], [f"n = {level}" for level in levels]
    words = (
        "Where each of h heads looks at exactly one token, after n levels an output knows of (h + 1)ⁿ inputs at most."
    )
    return Example("A9", "Receptive field", words, [Panel("inputs seen", sizes, rows, columns)])


def sinusoidal() -> Example:
    width, count = inputs("sinusoidal")["width"], inputs("sinusoidal")["num_positions"]
    table = sinusoids(torch.arange(count), width, SinusoidalPositions(), torch.float64)
    rows = [f"position {number}" for number in range(count)]
    words = "A sine and a cosine for each pair of dimensions; the further right, the slower they turn."
    return Example("B1", "Sinusoidal positions", words, [Panel("encoding", table, rows)])


def counting_without_positions() -> Example:
    count, width = inputs("nope")["num_tokens"], 2
    x = torch.zeros(count, width, dtype=torch.float64)
    x[:, 0], x[0, 1] = 1.0, 1.0
    ones, zeros = torch.ones(width, width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    keys, values = zeros.clone(), zeros.clone()
    keys[0], values[1, 0] = 1.0, 1.0
    attention = head_with(ones, keys, values)
    output = attention(x[None], AttentionContext(Mask(causal=True), fused_attention, torch.arange(count)[None]))[0]
    panels = [Panel("x", x.T, rows=("every token", "first token")), Panel("output", output[:, :1].T)]
    words = (
        "Only the first token has a value. A causal head that looks at all tokens alike gives token t the mean of t "
        "values, 1/t: a position, though no position went in."
    )
    return Example("B4", "Counting without positions", words, panels)


def cached_decoding() -> Example:
    given = {name: tensor(rows) for name, rows in inputs("cache").items()}
    attention, x = head_with(given["W_q"], given["W_k"], given["W_v"]), given["x"][None]
    count = x.shape[1]
    whole = attention(x, AttentionContext(Mask(causal=True), fused_attention, torch.arange(count)[None]))[0]
    store, outputs, panels = ContiguousStore(), [], [Panel("x", given["x"])]
    for step in range(count):
        context = AttentionContext(ALL, fused_attention, torch.tensor([[step]]), keep=partial(store.write, step))
        outputs.append(attention(x[:, step : step + 1], context)[0])
        kept = torch.cat([buffer[0, 0, : step + 1] for buffer in store.tensors().values()], dim=-1)
        panels.append(Panel(f"kept after token {step + 1}", kept, columns=("k", "k", "v", "v")))
    panels += [Panel("outputs, token by token", torch.cat(outputs)), Panel("outputs, in one pass", whole)]
    words = (
        "Each token is projected once; its key and value are kept, and the next query looks at all that is kept. The "
        "outputs are those of one pass over the whole text."
    )
    return Example("E2", "Decoding with a cache", words, panels)


def key_projections() -> Example:
    lengths = inputs("projections")["num_tokens"]
    attention = head_with(*(tensor(inputs("cache")[name]) for name in ("W_q", "W_k", "W_v")))
    counted: list[int] = []
    attention.key.register_forward_hook(lambda module, given, projected: counted.append(given[0].shape[1]))

    def count(length: int, cached: bool) -> int:
        counted.clear()
        store = ContiguousStore()
        for step in range(length):
            keep = partial(store.write, step) if cached else None
            read = torch.zeros(1, 1 if cached else step + 1, 2, dtype=torch.float64)
            attention(read, AttentionContext(ALL, fused_attention, torch.tensor([[step]]), keep=keep))
        return sum(counted)

    counts = tensor([[count(length, cached) for length in lengths] for cached in (False, True)])
    columns = [f"{length} token{'s' * (length > 1)}" for length in lengths]
    words = "Keys projected in one layer to generate a text: anew for every prefix, or once for each token."
    panel = Panel("key projections", counts, ("without a cache", "with a cache"), columns)
    return Example("E2", "What a cache saves", words, [panel])
