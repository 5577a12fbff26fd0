"""Worked examples of part A of the book: one head, the scale, alignment, the mask and temperature (A1 to A6).

    for example in attention_examples(): print(example.title, [panel.name for panel in example.panels])

The network's own modules compute them in float64. The inputs are in assets/inputs.json; no result is stored.
"""

import torch
from torch import Tensor

from clearhead.course.parts import (
    NO_MASK,
    Chart,
    Example,
    Panel,
    Part,
    attend_with_scores,
    inputs,
    numbered,
    single_head,
    tensor,
)
from clearhead.model import AttentionSteps, Mask, Scoring, attention_steps, masked_softmax

_SCALE_WIDTHS = (4, 16, 64, 256, 1024)
_NUM_SAMPLES = 4000


def attention_examples() -> list[Example]:
    """Compute the examples of A1 to A6."""
    return [
        _projections(),
        _one_head(),
        _two_keys(),
        _variance(),
        _alignment(),
        _translation(),
        _causal_mask(),
        *map(_heatmap_example, inputs("heatmaps")),
        _temperature(),
    ]


def _one_head_steps() -> tuple[dict[str, Tensor], AttentionSteps]:
    """Return the inputs, the projections, and attention without a scale."""
    matrices = {name: tensor(rows) for name, rows in inputs("one_head").items()}
    attention, x = single_head(matrices["W_q"], matrices["W_k"], matrices["W_v"]), matrices["x"][None]
    for name, linear in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
        matrices[name] = attention.project(linear, x, num_heads=1)[0, 0]
    q, k, v = (matrices[name][None, None] for name in "qkv")
    return matrices, attention_steps(q, k, v, Scoring(mask=NO_MASK, scale=1.0))


def _projections() -> Example:
    matrices, _ = _one_head_steps()
    tokens = numbered("token", len(matrices["x"]))
    panels = [Panel("x", matrices["x"], rows=tokens)]
    panels += [Panel(name, matrices[name]) for name in ("W_q", "W_k", "W_v")]
    panels += [Panel(f"{name} = x·W_{name}", matrices[name], rows=tokens) for name in "qkv"]
    explanation = (
        "Three tokens with two numbers each (d = 2). Queries and keys have three numbers (d_k = 3), values two "
        "(d_v = 2). Row 1 of q is (2, 3)·W_q = 2·(1, 0, 2) + 3·(0, 1, −3) = (2, 3, −5). All rows at once are the "
        "product of two matrices."
    )
    return Example("A1", "Queries, keys and values", explanation, panels)


def _one_head() -> Example:
    matrices, steps = _one_head_steps()
    tokens = numbered("token", len(matrices["x"]))
    panels = [
        Panel("q", matrices["q"], rows=tokens),
        Panel("k", matrices["k"], rows=tokens),
        Panel("v", matrices["v"], rows=tokens),
        Panel("scores = q·kᵀ", steps.scores[0, 0], tokens, tokens),
        Panel("weights = softmax(scores)", steps.weights[0, 0], tokens, tokens, kind="weights"),
        Panel("output = weights·v", steps.output[0, 0], rows=tokens),
    ]
    explanation = (
        "The queries, keys and values of A1. The score in row 3, column 2 is q₃·k₂ = 1·0 + (−2)·0 + 8·1 = 8. Each row "
        "of weights sums to one. Token 3 gives nearly all of its weight to token 2, so its output is nearly v₂. The "
        "scores are not scaled here."
    )
    return Example("A2", "One head, from scores to output", explanation, panels)


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
    explanation = (
        f"One query and two keys of {width} numbers; their products are given, {query[0]:g} and {query[1]:g}. They are "
        f"divided by √{width} = {width**0.5:g} before the softmax."
    )
    return Example("A3", "Two keys and the scale", explanation, panels)


def _variance() -> Example:
    """Sample standard normal queries and keys, and compute the variance of their scores and the softmax of a row."""
    generator = torch.Generator().manual_seed(0)
    variances: dict[str, list[float]] = {"q·k": [], "q·k / √d": []}
    largest: dict[str, list[float]] = {"q·k": [], "q·k / √d": []}
    for width in _SCALE_WIDTHS:
        q, k = torch.randn(2, 1, 1, _NUM_SAMPLES, width, generator=generator, dtype=torch.float64)
        for name, scale in (("q·k", 1.0), ("q·k / √d", width**-0.5)):
            steps = attention_steps(q[..., :64, :], k[..., :64, :], k[..., :64, :], Scoring(NO_MASK, scale=scale))
            variances[name].append(float(((q * k).sum(dim=-1) * scale).var()))
            largest[name].append(float(steps.weights.amax(dim=-1).mean()))
    rows, columns = list(variances), [f"d = {width}" for width in _SCALE_WIDTHS]
    panels: list[Part] = [
        Panel("variance of the score", tensor(list(variances.values())), rows, columns),
        Panel("largest of 64 weights, mean", tensor(list(largest.values())), rows, columns),
        Chart("variance over d", _SCALE_WIDTHS, dict(variances), x_label="d", log_x=True, log_y=True),
    ]
    explanation = (
        f"{_NUM_SAMPLES} pairs of standard normal vectors for each d. The variance of q·k is about d, and about 1 "
        "after division by √d. Without the division, one of 64 keys gets nearly all of the weight when d is large."
    )
    return Example("A3", "Variance of the scores, sampled", explanation, panels)


def _alignment() -> Example:
    states, state = tensor(inputs("alignment")["encoder_states"]), tensor(inputs("alignment")["decoder_state"])
    steps = attention_steps(
        state[None, None, None], states[None, None], states[None, None], Scoring(NO_MASK, scale=1.0)
    )
    mixing = tensor(inputs("alignment")["mixing"])
    next_state = torch.tanh(torch.cat((state, steps.output[0, 0, 0])) @ mixing)
    words = ("I", "am", "learning")
    panels = [
        Panel("encoder states h", states, rows=words),
        Panel("decoder state s", state[None]),
        Panel("scores = s·h", steps.scores[0, 0], columns=words),
        Panel("weights", steps.weights[0, 0], columns=words, kind="weights"),
        Panel("context c = Σ weight·h", steps.output[0, 0]),
        Panel("W", mixing, rows=("s", "s", "c", "c")),
        Panel("next state = tanh([s; c]·W)", next_state[None]),
    ]
    explanation = (
        "A recurrent decoder weights the states of the encoder by their relevance to its current step. Its context is "
        "their weighted mean, so the last encoder state does not have to represent the whole sentence. The matrix W is "
        "an example; a network learns it. Vectors are rows here, so they are multiplied with W from the left, as in A1."
    )
    return Example("A4", "Alignment between decoder and encoder", explanation, panels)


def _translation() -> Example:
    given = inputs("translation")
    queries, keys = tensor(given["decoder_states"]), tensor(given["encoder_states"])
    steps = attention_steps(queries[None, None], keys[None, None], keys[None, None], Scoring(NO_MASK, scale=1.0))
    panels = [
        Panel("encoder states", keys, rows=given["source"]),
        Panel("decoder states", queries, rows=given["target"]),
        Panel("weights", steps.weights[0, 0], given["target"], given["source"], kind="weights"),
    ]
    explanation = (
        "An alignment as a heatmap: each French word attends to the English words it translates. The states are chosen "
        "by hand, so that a word and its translation point the same way; a trained network finds such states."
    )
    return Example("A4", "Alignment as a heatmap", explanation, panels)


def _causal_mask() -> Example:
    scores = tensor(inputs("causal")["scores"])
    allowed = torch.ones_like(scores, dtype=torch.bool).tril()
    steps = attend_with_scores(scores, Mask(causal=True))
    masked_weights = masked_softmax(scores, None) * allowed  # the wrong order: mask after the softmax
    tokens = [str(number) for number in range(1, len(scores) + 1)]
    row_sums = torch.stack((steps.weights[0, 0].sum(-1), masked_weights.sum(-1)))
    panels = [
        Panel("scores", scores, tokens, tokens, kind="scores"),
        Panel("after the mask", scores.masked_fill(~allowed, -torch.inf), tokens, tokens, "scores", allowed),
        Panel("weights", steps.weights[0, 0], tokens, tokens, kind="weights", allowed=allowed),
        Panel("row sums", row_sums, ("mask first", "mask last"), tokens),
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
    tokens = [str(number) for number in range(1, len(scores) + 1)]
    panels = [
        Panel("scores", scores, tokens, tokens, kind="scores", allowed=allowed),
        Panel("weights", weights, tokens, tokens, kind="weights", allowed=allowed),
    ]
    return Example("A6", f"Heatmap {name}: {pattern}", explanation, panels)


def _temperature() -> Example:
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
