"""Attention views and lens tables of random numbers, for tests of pages and pictures."""

import torch

from clearhead.inspection.lens_table import LensPrediction, LensTable
from clearhead.inspection.views import AttentionMatrices, AttentionView

TEXTS = ["The", " cat", " sat", "\n", "on", "</script>", "<img onerror=alert(1)>", "é", "猫", "\x1b[31m"]


def token_texts(length):
    return [TEXTS[position % len(TEXTS)] for position in range(length)]


def causal_view(length=10, num_layers=3, num_heads=4, title="self-attention", seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(num_layers, num_heads, length, length, generator=generator)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return AttentionView(
        title=title,
        rows=token_texts(length),
        columns=token_texts(length),
        num_heads=[num_heads] * num_layers,
        matrices=lambda layer, head: AttentionMatrices(weights[layer], scores[layer], allowed),
    )


def cross_view(length=6, num_keys=9, num_layers=2, num_heads=2):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(num_layers, num_heads, length, num_keys, generator=generator).softmax(-1)
    return AttentionView(
        title="cross-attention",
        rows=token_texts(length),
        columns=token_texts(num_keys),
        num_heads=[num_heads] * num_layers,
        matrices=lambda layer, head: AttentionMatrices(weights[layer]),
    )


def random_lens(view, num_layers=3, top=5, vocab_size=50):
    generator = torch.Generator().manual_seed(2)
    length, predictions = len(view.rows), []
    for layer in range(num_layers):
        for after in ("attention", "feed_forward"):
            best = (3 * torch.randn(length, vocab_size, generator=generator)).softmax(dim=-1).topk(top)
            predictions.append(LensPrediction(layer, after, best.indices, best.values, torch.zeros(length)))
    return LensTable(predictions, token_text=lambda token: TEXTS[token % len(TEXTS)] + str(token))
