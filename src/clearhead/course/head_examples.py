"""Worked examples of part A of the book: many heads, permutations, receptive fields and the uses of attention (A7-A10).

for example in head_examples(): print(example.title)
"""

import torch

from clearhead.architecture import GroupedAttention
from clearhead.course.parts import (
    NO_MASK,
    Example,
    Panel,
    attend_with_scores,
    causal_context,
    inputs,
    numbered,
    single_head,
    tensor,
)
from clearhead.model import Attention, AttentionContext, Mask, fused_attention

_HEADS, _WIDTH, _LENGTH = 8, 64, 100  # h, d and M of A7


def head_examples() -> list[Example]:
    """Compute the examples of A7 to A10."""
    return [_sharing(), _permutation(), _receptive_field(), _three_uses()]


def _sharing() -> Example:
    """Count the weights of key and value projections: every token multiplies each weight once."""
    rows, counts = [], []
    for name, num_kv_heads in (("multi-head", _HEADS), ("grouped, 2 groups", 2), ("multi-query", 1)):
        config = GroupedAttention(num_heads=_HEADS, num_kv_heads=num_kv_heads, head_width=_WIDTH)
        attention = Attention(config, _WIDTH)
        num_weights = attention.key.weight.numel() + attention.value.weight.numel()
        rows.append(name)
        counts.append([num_kv_heads, _LENGTH * num_weights, 2 * num_kv_heads * _WIDTH])
    columns = ("key-value heads", "multiply-accumulates for K and V", "cached numbers per token")
    saved = tensor([[counts[0][1] - counts[2][1], 2 * _LENGTH * _WIDTH**2 * (_HEADS - 1)]])
    panels = [
        Panel("keys and values", tensor(counts), rows, columns, num_digits=8),
        Panel("saved by multi-query", saved, columns=("counted", "2Md²(h − 1)"), num_digits=8),
    ]
    explanation = (
        f"h = {_HEADS} query heads, each d × d with d = {_WIDTH}, and M = {_LENGTH} tokens. The weights of the layers "
        "are counted, and each is multiplied once for every token."
    )
    return Example("A7", "Sharing keys and values", explanation, panels)


def _permutation() -> Example:
    matrices = {name: tensor(rows) for name, rows in inputs("one_head").items()}
    attention = single_head(matrices["W_q"], matrices["W_k"], matrices["W_v"])
    order = [2, 0, 1]
    context = AttentionContext(NO_MASK, fused_attention, torch.arange(3)[None])
    output = attention(matrices["x"][None], context)[0]
    permuted = attention(matrices["x"][order][None], context)[0]
    tokens = numbered("token", 3)
    moved = [tokens[number] for number in order]
    panels = [
        Panel("x", matrices["x"], rows=tokens),
        Panel("Attn(x)", output, rows=tokens),
        Panel("P x", matrices["x"][order], rows=moved),
        Panel("Attn(P x)", permuted, rows=moved),
        Panel("largest |Attn(P x) − P Attn(x)|", (permuted - output[order]).abs().max()[None, None]),
    ]
    explanation = "The tokens of A1 in another order, scale 1/√3: every output moves with its token, unchanged."
    return Example("A8", "Another order, the same outputs", explanation, panels)


def _receptive_field() -> Example:
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
        "If each of h heads attends to one token only, an output depends on at most (h + 1)ⁿ inputs after n levels: "
        "itself through the residual connection, and one token per head."
    )
    return Example("A9", "Receptive field", explanation, [Panel("inputs seen", sizes, rows, columns)])


def _three_uses() -> Example:
    matrices = {name: tensor(rows) for name, rows in inputs("cache").items()}
    attention, x = single_head(matrices["W_q"], matrices["W_k"], matrices["W_v"]), matrices["x"][None]
    source = tensor(inputs("alignment")["encoder_states"])[None]
    free = AttentionContext(NO_MASK, fused_attention, torch.arange(3)[None])
    nothing_allowed = torch.tensor([[True, True, False], [False, False, False]])
    padded = attend_with_scores(torch.zeros(2, 3, dtype=torch.float64), Mask(nothing_allowed)).weights[0, 0]
    tokens = numbered("token", 3)
    panels = [
        Panel("x", matrices["x"], tokens),
        Panel("encoder states", source[0], numbered("state", 3)),
        *(Panel(name, matrices[name]) for name in ("W_q", "W_k", "W_v")),
        Panel("self: Attn(x, x)", attention(x, free)[0], tokens),
        Panel("causal self: Attn(x, x), masked", attention(x, causal_context(3))[0], tokens),
        Panel("cross: Attn(x, encoder states)", attention(x, free, source)[0], tokens),
        Panel("weights, third key is padding", padded, ("query 1", "query 2"), numbered("key", 3), "weights"),
    ]
    explanation = (
        "One module with the same weights, used three ways, with scores divided by √2. Without the mask every token "
        "gives nearly all of its weight to token 3, whose key is largest. The last table is another example, with "
        "equal scores: key 3 is padding, and query 2 may attend to nothing, so its weights are 0, not NaN."
    )
    return Example("A10", "Three uses of one module", explanation, panels)
