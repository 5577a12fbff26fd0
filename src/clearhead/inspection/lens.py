"""The logit lens: decode the residual stream at every depth as if it were the last (nostalgebraist 2020).

    for prediction in logit_lens(trace, top=3): print(prediction.layer, prediction.after, prediction.top_ids[-1])

Each prediction belongs to the stream after one branch of one layer. The last layer is always included, so the final
prediction is that of the model.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from clearhead.errors import ClearheadError
from clearhead.inspection.attention_heads import check_index
from clearhead.inspection.lens_table import Branch, LensPrediction, LensTable
from clearhead.inspection.token_labels import token_text
from clearhead.inspection.trace import Trace
from clearhead.tokenization import Tokenizer

_ROWS = 256  # residual states that are decoded together: each reads the head once, and has the logits of all tokens


def logit_lens(
    trace: Trace, top: int = 5, every: int = 1, positions: Iterable[int] | None = None
) -> list[LensPrediction]:
    """Return predictions after both branches of every `every`-th layer, from the first to the last layer.

    The layers are counted from the last, which is always included. positions: the tokens to decode; None takes all.
    """
    if not 1 <= top <= trace.config.vocab_size:
        raise ClearheadError(f"top is {top}; it must be from 1 to the vocabulary size, {trace.config.vocab_size}")
    if every < 1:
        raise ClearheadError(f"every is {every}; it must be at least 1")
    length, last = len(trace.tokens), trace.num_layers - 1
    selected = range(length) if positions is None else [check_index("position", one, length) for one in positions]
    indices = torch.tensor(list(selected), dtype=torch.long)
    stages: list[tuple[int, Branch]] = []
    states: list[Tensor] = []
    for layer in range(last % every, last + 1, every):
        stages += [(layer, "attention"), (layer, "feed_forward")]
        states += [trace.residual_middle(layer, positions=indices), trace.residual(layer + 1)[indices]]
    decoded = [_decode(trace, part, top) for part in torch.cat(states).split(_ROWS)]
    shape = (len(stages), len(indices))
    ids, probabilities, entropies = (torch.cat(parts).unflatten(0, shape) for parts in zip(*decoded, strict=True))
    rows = zip(stages, ids, probabilities, entropies, strict=True)
    return [LensPrediction(layer, after, *values) for (layer, after), *values in rows]


def _decode(trace: Trace, states: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the likely tokens of residual states (n, D) and their probabilities (n, top), and the entropies (n,)."""
    probabilities = trace.compute_logits(states).float().softmax(dim=-1)
    best = probabilities.topk(top, dim=-1)
    return best.indices, best.values, torch.special.entr(probabilities).sum(dim=-1)


def make_lens_table(trace: Trace, tokenizer: Tokenizer | None, num_tokens: int = 1) -> LensTable:
    """Compute the logit lens over the last `num_tokens` tokens of a trace, to display it."""
    length = len(trace.tokens)
    predictions = logit_lens(trace, positions=range(max(length - num_tokens, 0), length))
    return LensTable(predictions, lambda token: token_text(token, tokenizer))
