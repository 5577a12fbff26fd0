"""Gopher compared with its equations, written out with Transformer-XL's own relative shift."""

import torch
from torch.nn import functional

from clearhead.families.gopher import gopher_config
from clearhead.model.transformer import Transformer
from tests.parity.equations import check_equations, tensors_under
from tests.parity.harness import VOCAB

# Heads of another width than 48 / 4, as in the 417M model
CONFIG = gopher_config(width=48, num_layers=3, num_heads=4, head_width=10, vocab_size=VOCAB, epsilon=1e-3)


def rms(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def relative_shift(scores):
    """Move the score of distance T - 1 - c, in column c of row i, to key c - (T - 1 - i).

    Prepending a column of zeros and reshaping does this.
    """
    batch, heads, rows, columns = scores.shape
    padded = torch.cat([scores.new_zeros(batch, heads, rows, 1), scores], dim=-1)
    return padded.reshape(batch, heads, columns + 1, rows)[:, :, 1:].reshape(batch, heads, rows, columns)


def equations(weights, inputs):
    """Return the logits: Dai et al. 2019, §3.3 and appendix B, in the block of GPT-2 with RMS norms."""
    tokens, real = inputs["tokens"], inputs["attention_mask"].bool()
    batch, length = tokens.shape
    x = weights["decoder.embedding.tokens.weight"][tokens]
    distances = torch.arange(length - 1, -1, -1, dtype=torch.float64)
    frequencies = 1 / 10000 ** (torch.arange(0, 48, 2, dtype=torch.float64) / 48)
    angles = torch.outer(distances, frequencies)
    sinusoids = torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1) | ~real[:, None, None, :]

    def heads(y):
        return y.view(-1, length, 4, 10).permute(0, 2, 1, 3)

    for number in range(3):
        w = tensors_under(weights, f"decoder.layers.{number}.")
        h = rms(x, w["attention_residual.norm.weight"])
        q, k, v = (heads(h @ w[f"attention.{part}.weight"].T) for part in ("query", "key", "value"))
        r = heads(sinusoids @ w["attention.relative.projection.weight"].T)
        content = (q + w["attention.relative.content_bias"][:, None]) @ k.mT
        place = relative_shift((q + w["attention.relative.distance_bias"][:, None]) @ r.mT)
        scores = ((content + place) / 10**0.5).masked_fill(hidden, -1e30)
        mixed = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(batch, length, 40)
        x = x + mixed @ w["attention.output.weight"].T
        h = rms(x, w["feed_forward_residual.norm.weight"])
        inner = functional.gelu(h @ w["feed_forward.up.weight"].T, approximate="tanh")
        x = x + inner @ w["feed_forward.down.weight"].T
    return rms(x, weights["decoder.final_norm.weight"]) @ weights["decoder.embedding.tokens.weight"].T


def test_logits_agree_with_the_equations():
    assert check_equations(CONFIG, equations) >= 30


def test_torch_compile_needs_no_graph_break():
    """The distances are computed in every forward pass, without anything that torch.compile cannot trace."""
    network, tokens = Transformer(CONFIG).eval(), torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(torch.compile(network, fullgraph=True, backend="eager")(tokens), network(tokens))
