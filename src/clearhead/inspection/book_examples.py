"""The worked examples of the book, computed in float64 by the network's own modules.

    for example in worked_examples(): print(example.title, [panel.name for panel in example.panels])

The inputs are in assets/book.json. No result is stored.
"""

from collections.abc import Callable
from functools import partial

import torch

from clearhead.architecture import SinusoidalPositions
from clearhead.cache import ContiguousStore
from clearhead.inspection.book_parts import (
    NO_MASK,
    Example,
    Panel,
    attend_with_scores,
    causal_context,
    inputs,
    single_head,
    step_context,
    tensor,
)
from clearhead.model import Mask, Scoring, attention_steps, masked_softmax, sinusoids


@torch.no_grad()
def worked_examples() -> list[Example]:
    """Compute all examples, in the order of the book."""
    builders: list[Callable[[], Example]] = [
        _one_head,
        _two_keys,
        alignment,
        _causal_mask,
        *(partial(_heatmap_example, name) for name in inputs("heatmaps")),
        temperature,
        receptive_field,
        sinusoidal,
        _counting_without_positions,
        _cached_decoding,
        _key_projections,
    ]
    return [build() for build in builders]


def _one_head() -> Example:
    matrices = {name: tensor(rows) for name, rows in inputs("one_head").items()}
    attention, x = single_head(matrices["W_q"], matrices["W_k"], matrices["W_v"]), matrices["x"][None]
    q, k, v = (
        attention.project(linear, x, num_heads=1) for linear in (attention.query, attention.key, attention.value)
    )
    steps = attention_steps(q, k, v, Scoring(mask=NO_MASK, scale=1.0))
    panels = [Panel(name, matrices[name]) for name in ("x", "W_q", "W_k", "W_v")]
    panels += [Panel(f"{name} = x·W_{name}", part[0, 0]) for name, part in (("q", q), ("k", k), ("v", v))]
    panels += [
        Panel("scores = q·kᵀ", steps.scores[0, 0]),
        Panel("weights = softmax(scores)", steps.weights[0, 0], kind="weights"),
        Panel("output = weights·v", steps.output[0, 0]),
    ]
    explanation = (
        "Three tokens of width 2. Each is projected to a query, a key and a value. Entry (i, j) of the scores is the "
        "product of query i and key j. Each row of weights sums to one, and the output is the average of the values "
        "under these weights. The scores are not scaled here."
    )
    return Example("A1, A2", "One head, from tokens to output", explanation, panels)


def _two_keys() -> Example:
    query, width = inputs("two_keys")["query"], inputs("two_keys")["width"]
    q = torch.zeros(1, 1, 1, width, dtype=torch.float64)
    q[..., : len(query)] = tensor(query)
    k = torch.eye(len(query), width, dtype=torch.float64)[None, None]
    steps = attention_steps(q, k, k, Scoring(mask=NO_MASK, scale=width**-0.5))
    panels = [
        Panel("q·kᵀ", tensor([query])),
        Panel("scores = q·kᵀ / √d", steps.scores[0, 0]),
        Panel("weights", steps.weights[0, 0], kind="weights"),
    ]
    explanation = f"The width is {width}, so the products are divided by √{width} = {width**0.5:g} before the softmax."
    return Example("A2, A3", "Two keys and the scale", explanation, panels)


def alignment() -> Example:
    states, state = tensor(inputs("alignment")["encoder_states"]), tensor(inputs("alignment")["decoder_state"])
    steps = attention_steps(
        state[None, None, None], states[None, None], states[None, None], Scoring(NO_MASK, scale=1.0)
    )
    panels = [
        Panel("encoder states h", states),
        Panel("decoder state s", state[None]),
        Panel("scores = s·h", steps.scores[0, 0]),
        Panel("weights", steps.weights[0, 0], kind="weights"),
        Panel("context = Σ weight·h", steps.output[0, 0]),
    ]
    explanation = (
        "A recurrent decoder weights the states of the encoder by their relevance to its current step. Its context is "
        "their weighted mean, so the last encoder state does not have to represent the whole sentence."
    )
    return Example("A4", "Alignment between decoder and encoder", explanation, panels)


def _causal_mask() -> Example:
    scores = tensor(inputs("causal")["scores"])
    allowed = torch.ones_like(scores, dtype=torch.bool).tril()
    steps = attend_with_scores(scores, Mask(causal=True))
    masked_weights = masked_softmax(scores, None) * allowed  # the wrong order: mask after the softmax
    row_sums = torch.stack((steps.weights[0, 0].sum(-1), masked_weights.sum(-1)))
    panels = [
        Panel("scores", scores, kind="scores"),
        Panel("after the mask", scores.masked_fill(~allowed, -torch.inf), kind="scores", allowed=allowed),
        Panel("weights", steps.weights[0, 0], kind="weights", allowed=allowed),
        Panel("row sums", row_sums, rows=("mask first", "mask last")),
    ]
    explanation = (
        "A token attends to itself and to earlier tokens. The mask is applied before the softmax, so every row sums "
        "to one. Masking the weights after the softmax leaves rows that sum to less, as the last table shows."
    )
    return Example("A5", "The causal mask", explanation, panels)


_HEATMAPS = {
    "A": ("uniform", "All scores are equal, so every token attends equally to all tokens."),
    "B": ("diagonal", "One score in each row is larger by 9, and the softmax gives it nearly all of the weight."),
    "C": ("causal", "Equal scores under the causal mask: each row divides its weight equally among the tokens so far."),
    "D": ("shifted", "Each token can attend to one other token only: to the next, and the last one to the first."),
}


def _heatmap_example(name: str) -> Example:
    matrix = inputs("heatmaps")[name]
    scores = tensor([[-torch.inf if cell is None else cell for cell in row] for row in matrix])
    allowed = scores.isfinite()
    weights = attend_with_scores(scores.masked_fill(~allowed, 0.0), Mask(allowed)).weights[0, 0]
    pattern, explanation = _HEATMAPS[name]
    panels = [
        Panel("scores", scores, kind="scores", allowed=allowed),
        Panel("weights", weights, kind="weights", allowed=allowed),
    ]
    return Example("A6", f"Heatmap {name}: {pattern}", explanation, panels)


def temperature() -> Example:
    row, temperatures = tensor([inputs("temperature")["row"]]), inputs("temperature")["temperatures"]
    weights = [attend_with_scores(row, scale=1 / each).weights[0, 0, 0] for each in temperatures]
    panels = [
        Panel("scores", row),
        Panel("weights", torch.stack(weights), rows=[f"T = {each:g}" for each in temperatures], kind="weights"),
    ]
    explanation = (
        "The scores are divided by a temperature. Towards 0 the largest score gets all of the weight; towards infinity "
        "the weights become equal."
    )
    return Example("A6", "Temperature", explanation, panels)


def receptive_field() -> Example:
    """Count inputs for argmax attention with a residual: a node reads itself and one new node per head."""
    heads, levels = inputs("receptive_field")["heads"], inputs("receptive_field")["levels"]

    def num_reached(num_heads: int, num_levels: int) -> int:
        reached = {0}
        for _ in range(num_levels):
            span = len(reached)
            reached = {node + head * span for node in reached for head in range(num_heads + 1)}
        return len(reached)

    sizes = tensor([[num_reached(count, level) for level in levels] for count in heads])
    rows, columns = [f"h = {count}" for count in heads], [f"n = {level}" for level in levels]
    explanation = (
        "If each of h heads attends to one token only, an output depends on at most (h + 1)ⁿ inputs after n levels."
    )
    return Example("A9", "Receptive field", explanation, [Panel("inputs seen", sizes, rows, columns)])


def sinusoidal() -> Example:
    width, count = inputs("sinusoidal")["width"], inputs("sinusoidal")["num_positions"]
    table = sinusoids(torch.arange(count), width, SinusoidalPositions(), torch.float64)
    rows = [f"position {number}" for number in range(count)]
    explanation = "Each pair of dimensions has a sine and a cosine; later pairs have lower frequencies."
    return Example("B1", "Sinusoidal positions", explanation, [Panel("encoding", table, rows, num_digits=6)])


def _counting_without_positions() -> Example:
    count, width = inputs("nope")["num_tokens"], 2
    x = torch.zeros(count, width, dtype=torch.float64)
    x[:, 0], x[0, 1] = 1.0, 1.0
    ones, zeros = torch.ones(width, width, dtype=torch.float64), torch.zeros(width, width, dtype=torch.float64)
    keys, values = zeros.clone(), zeros.clone()
    keys[0], values[1, 0] = 1.0, 1.0
    attention = single_head(ones, keys, values)
    output = attention(x[None], causal_context(count))[0]
    panels = [Panel("x", x.T, rows=("every token", "first token")), Panel("output", output[:, :1].T)]
    explanation = (
        "Only the first token has a nonzero value. A causal head that attends equally to all tokens returns the mean "
        "of t values for token t, which is 1/t: it encodes the position although the input has no position encoding."
    )
    return Example("B4", "Counting without positions", explanation, panels)


def _cached_decoding() -> Example:
    matrices = {name: tensor(rows) for name, rows in inputs("cache").items()}
    attention, x = single_head(matrices["W_q"], matrices["W_k"], matrices["W_v"]), matrices["x"][None]
    count = x.shape[1]
    one_pass = attention(x, causal_context(count))[0]
    store, outputs, panels = ContiguousStore(), [], [Panel("x", matrices["x"])]
    for step in range(count):
        outputs.append(attention(x[:, step : step + 1], step_context(step, store))[0])
        cached = torch.cat([buffer[0, 0, : step + 1] for buffer in store.tensors().values()], dim=-1)
        panels.append(Panel(f"cache after token {step + 1}", cached, columns=("k", "k", "v", "v")))
    panels += [Panel("outputs, token by token", torch.cat(outputs)), Panel("outputs, in one pass", one_pass)]
    explanation = (
        "Each token is projected once. Its key and value are stored in the cache, and later queries attend to all "
        "cached keys. The outputs equal those of one pass over the whole text."
    )
    return Example("E2", "Decoding with a cache", explanation, panels)


def _key_projections() -> Example:
    lengths = inputs("projections")["num_tokens"]
    attention = single_head(*(tensor(inputs("cache")[name]) for name in ("W_q", "W_k", "W_v")))
    projected: list[int] = []
    attention.key.register_forward_hook(lambda module, inputs, output: projected.append(inputs[0].shape[1]))

    def count_projections(length: int, cached: bool) -> int:
        projected.clear()
        store = ContiguousStore() if cached else None
        for step in range(length):
            x = torch.zeros(1, 1 if cached else step + 1, 2, dtype=torch.float64)
            attention(x, step_context(step, store))
        return sum(projected)

    counts = tensor([[count_projections(length, cached) for length in lengths] for cached in (False, True)])
    columns = [f"{length} token{'s' * (length > 1)}" for length in lengths]
    explanation = "Key projections in one layer to generate a text: without a cache, every prefix is projected again."
    panel = Panel("key projections", counts, ("without a cache", "with a cache"), columns)
    return Example("E2", "What a cache saves", explanation, [panel])
