"""Traces of toy models, for tests of what is computed from a trace."""

import torch

from clearhead.api import Model
from clearhead.families import preset
from clearhead.inspection import Trace
from clearhead.inspection.attention_heads import AttentionHeads
from clearhead.model import Mask, Scoring
from tests.model.toys import decoder, toy
from tests.toy_presets import shrink

TOKENS, OTHER, SOURCE = [3, 14, 15, 9, 2, 6, 5, 3], [3, 14, 15, 8, 2, 6, 5, 3], [2, 7, 18, 28, 1]


def trace_toy(name, tokens=TOKENS):
    """Trace a small network of a family."""
    model = Model(toy(shrink(preset(name))))
    return model.trace(tokens, SOURCE if model.config.is_encoder_decoder else None)


def trace_with_weights(rows):
    """Return a trace of two layers with the same weights (T, T) in every head; the scores are their logarithms."""
    weights = torch.tensor(rows, dtype=torch.float64)
    length = len(weights)
    one_hot = torch.eye(length, dtype=torch.float64)[None, None].expand(1, 4, -1, -1)
    scores = weights.clamp(min=1e-300).log()[None, None].expand(1, 4, -1, -1)
    heads = AttentionHeads(scores, one_hot, one_hot, Scoring(mask=Mask(causal=True), scale=1.0))
    residuals = {"decoder": dict.fromkeys(range(3), torch.zeros(length, 16))}
    texts = [str(token) for token in range(length)]
    return Trace(decoder(), list(range(length)), texts, residuals, heads={"decoder": [heads] * 2})
