"""The Transformer of 2017 against torch.nn's layers, the Annotated Transformer against its equations.

Marian with ReLU (test_bart.py) is a third witness of the post-norm form, Pegasus of the pre-norm form.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from clearhead.architecture import LayerNorm
from clearhead.families.transformer import annotated_transformer_config, transformer_config
from tests.parity.harness import VOCAB, check_equations, under

WIDTH, HEADS, LAYERS, EPSILON = 48, 4, 3, 1e-3
SIZES = {"width": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "feed_forward": 80}


def embed(tokens, table):
    """table[token] · √d + PE, PE(p, 2k) = sin(p / 10000^(2k/d)), PE(p, 2k + 1) = cos(p / 10000^(2k/d))."""
    positions = torch.arange(tokens.shape[1], dtype=torch.float64)
    encoding = torch.zeros(tokens.shape[1], WIDTH, dtype=torch.float64)
    for k in range(WIDTH // 2):
        encoding[:, 2 * k] = torch.sin(positions / 10000 ** (2 * k / WIDTH))
        encoding[:, 2 * k + 1] = torch.cos(positions / 10000 ** (2 * k / WIDTH))
    return table[tokens] * WIDTH**0.5 + encoding.to(table.dtype)


def future(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# --- torch.nn


def torch_attention(w):
    """nn.MultiheadAttention keeps query, key and value as one matrix; where we have no bias it has zeros."""
    projections = [w[f"{part}.weight"] for part in ("query", "key", "value")]
    zeros = torch.zeros(WIDTH, dtype=projections[0].dtype)
    return {
        "in_proj_weight": torch.cat(projections),
        "in_proj_bias": torch.cat([w.get(f"{part}.bias", zeros) for part in ("query", "key", "value")]),
        "out_proj.weight": w["output.weight"],
        "out_proj.bias": w.get("output.bias", zeros),
    }


def torch_layer(kind, w, norm_first):
    attentions = {"attention": "self_attn", "cross_attention": "multihead_attn"}
    if kind is nn.TransformerEncoderLayer:
        del attentions["cross_attention"]
    tensors = {f"linear1.{name}": one for name, one in under(w, "feed_forward.up.").items()}
    tensors |= {f"linear2.{name}": one for name, one in under(w, "feed_forward.down.").items()}
    for ours, theirs in attentions.items():
        tensors |= {f"{theirs}.{name}": one for name, one in torch_attention(under(w, f"{ours}.")).items()}
    for number, branch in enumerate([*attentions, "feed_forward"], 1):
        tensors |= {f"norm{number}.{name}": one for name, one in under(w, f"{branch}_residual.norm.").items()}
    layer = kind(WIDTH, HEADS, 80, 0.0, layer_norm_eps=EPSILON, batch_first=True, norm_first=norm_first).eval()
    layer.to(w["feed_forward.up.weight"].dtype).load_state_dict(tensors)
    return layer


def torch_layers(norm_first):
    def equations(weights, given):
        table = weights["encoder.embedding.tokens.weight"]
        padding = ~given["source_mask"].bool()
        x, y = embed(given["source"], table), embed(given["target"], table)
        for number in range(LAYERS):
            w = under(weights, f"encoder.layers.{number}.")
            x = torch_layer(nn.TransformerEncoderLayer, w, norm_first)(x, src_key_padding_mask=padding)
        x = last_norm(x, under(weights, "encoder.final_norm."))
        for number in range(LAYERS):
            layer = torch_layer(nn.TransformerDecoderLayer, under(weights, f"decoder.layers.{number}."), norm_first)
            y = layer(y, x, tgt_mask=future(y.shape[1]), memory_key_padding_mask=padding)
        return last_norm(y, under(weights, "decoder.final_norm.")) @ table.T

    def last_norm(x, w):
        assert bool(w) == norm_first  # torch.nn.Transformer has one always, the paper none
        return functional.layer_norm(x, (WIDTH,), w["weight"], w["bias"], EPSILON) if w else x

    return equations


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_equal_to_torch_layers(placement, attention_bias):
    config = transformer_config(
        **SIZES,
        source_vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        norm=LayerNorm(epsilon=EPSILON),
        placement=placement,
        attention_bias=attention_bias,
    )
    assert check_equations(config, torch_layers(norm_first=placement == "pre")) >= 60


# --- the Annotated Transformer


def deviation_norm(x, w):
    """a · (x - mean) / (std + ε) + b with the sample's standard deviation, which divides by d - 1."""
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.pow(2).sum(-1, keepdim=True) / (WIDTH - 1)).sqrt()
    return w["weight"] * centred / (deviation + 1e-6) + w["bias"]


def linear(x, w, name):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def multi_head_attention(x, encoder_output, hidden, w):
    def heads(y):
        return y.view(y.shape[0], -1, HEADS, WIDTH // HEADS).transpose(1, 2)

    q, k, v = (
        heads(linear(x, w, "query")),
        heads(linear(encoder_output, w, "key")),
        heads(linear(encoder_output, w, "value")),
    )
    scores = (q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).masked_fill(hidden, -1e9)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
    return linear(mixed, w, "output")


def annotated_equations(weights, given):
    """x + Sublayer(norm(x)) for each branch, a norm after each stack, W x + b."""
    padding, later = ~given["source_mask"].bool()[:, None, None, :], future(given["target"].shape[1])

    def feed_forward(y, w):
        return linear(linear(y, w, "feed_forward.up").clamp(min=0), w, "feed_forward.down")

    x = embed(given["source"], weights["encoder.embedding.tokens.weight"])
    for number in range(LAYERS):
        w = under(weights, f"encoder.layers.{number}.")
        h = deviation_norm(x, under(w, "attention_residual.norm."))
        x = x + multi_head_attention(h, h, padding, under(w, "attention."))
        x = x + feed_forward(deviation_norm(x, under(w, "feed_forward_residual.norm.")), w)
    encoder_output = deviation_norm(x, under(weights, "encoder.final_norm."))
    y = embed(given["target"], weights["decoder.embedding.tokens.weight"])
    for number in range(LAYERS):
        w = under(weights, f"decoder.layers.{number}.")
        h = deviation_norm(y, under(w, "attention_residual.norm."))
        y = y + multi_head_attention(h, h, later, under(w, "attention."))
        h = deviation_norm(y, under(w, "cross_attention_residual.norm."))
        y = y + multi_head_attention(h, encoder_output, padding, under(w, "cross_attention."))
        y = y + feed_forward(deviation_norm(y, under(w, "feed_forward_residual.norm.")), w)
    return linear(deviation_norm(y, under(weights, "decoder.final_norm.")), weights, "head")


def test_annotated_transformer_is_equal_to_its_equations():
    config = annotated_transformer_config(source_vocab_size=VOCAB + 4, target_vocab_size=VOCAB, **SIZES)
    assert check_equations(config, annotated_equations) >= 60
