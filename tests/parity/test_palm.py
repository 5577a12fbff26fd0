"""PaLM compared with its equations."""

import torch
from torch.nn import functional

from clearhead.families.palm import palm_config
from tests.parity.equations import check_equations, tensors_under
from tests.parity.harness import VOCAB

CONFIG = palm_config(width=48, num_layers=3, num_heads=4, head_width=20, vocab_size=VOCAB, epsilon=1e-3)


def norm(x, weight):
    return functional.layer_norm(x, (48,), weight, bias=None, eps=1e-3)


def rotate(x, positions):
    """Multiply the pairs (j, j + 10) as complex numbers by e^(i · position · θ_j). x (B, ..., T, 20)."""
    frequencies = 10000 ** (-torch.arange(10, dtype=torch.float64) / 10)
    angles = positions.double()[..., None] * frequencies
    rotated = torch.complex(x[..., :10].double(), x[..., 10:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([rotated.real, rotated.imag], dim=-1).to(x.dtype)


def equations(weights, inputs):
    """Return the logits: y = x + MLP(LayerNorm(x)) + Attention(LayerNorm(x)) with one key-value head.

    Chowdhery et al. 2022, §2.
    """
    tokens, positions = inputs["tokens"], inputs["position_ids"]
    batch, length = tokens.shape
    table = weights["decoder.embedding.tokens.weight"]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) | ~inputs["attention_mask"].bool()[:, None, None, :]
    x = table[tokens]
    for number in range(3):
        w = tensors_under(weights, f"decoder.layers.{number}.")
        h = norm(x, w["attention_residual.norm.weight"])
        q = (h @ w["attention.query.weight"].T).view(batch, length, 4, 20).transpose(1, 2)
        k, v = h @ w["attention.key.weight"].T, h @ w["attention.value.weight"].T
        q, k = rotate(q, positions[:, None]), rotate(k, positions)
        scores = (torch.einsum("bnth,bsh->bnts", q, k) / 20**0.5).masked_fill(hidden, -1e30)
        mixed = torch.einsum("bnts,bsh->btnh", scores.softmax(-1), v).reshape(batch, length, 80)
        gate, up = h @ w["feed_forward.gate.weight"].T, h @ w["feed_forward.up.weight"].T
        swish = gate * torch.sigmoid(gate)
        x = x + mixed @ w["attention.output.weight"].T + (swish * up) @ w["feed_forward.down.weight"].T
    return norm(x, weights["decoder.final_norm.weight"]) @ table.T / 48**0.5


def test_logits_agree_with_the_equations():
    assert check_equations(CONFIG, equations) >= 30
