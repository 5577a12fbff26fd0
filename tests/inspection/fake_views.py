"""Views on random matrices, for pages and pictures."""

import torch

from clearhead.inspection.lens import LensRow
from clearhead.inspection.views import Lens, Look, View

TEXTS = ["The", " cat", " sat", "\n", "on", "</script>", "<img onerror=alert(1)>", "é", "猫", "\x1b[31m"]


def texts(length):
    return [TEXTS[place % len(TEXTS)] for place in range(length)]


def causal_view(length=10, num_layers=3, num_heads=4, title="self-attention", seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(num_layers, num_heads, length, length, generator=generator)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return View(
        title=title,
        rows=texts(length),
        columns=texts(length),
        num_heads=[num_heads] * num_layers,
        look=lambda layer, head: Look(weights[layer], scores[layer], allowed),
    )


def cross_view(length=6, num_keys=9, num_layers=2, num_heads=2):
    weights = torch.randn(num_layers, num_heads, length, num_keys, generator=torch.Generator().manual_seed(1)).softmax(
        -1
    )
    return View(
        title="cross-attention",
        rows=texts(length),
        columns=texts(num_keys),
        num_heads=[num_heads] * num_layers,
        look=lambda layer, head: Look(weights[layer]),
    )


def lens_of(view, num_layers=3, count=5, vocabulary=50):
    generator = torch.Generator().manual_seed(2)
    rows = []
    for layer in range(num_layers):
        for after in ("attention", "feed_forward"):
            best = (3 * torch.randn(len(view.rows), vocabulary, generator=generator)).softmax(dim=-1).topk(count)
            rows.append(LensRow(layer, after, best.indices, best.values, torch.zeros(len(view.rows))))
    return Lens(rows, text_of=lambda token: TEXTS[token % len(TEXTS)] + str(token))
