"""The Transformer of 2017 compared with torch.nn's layers, the Annotated Transformer with its equations.

Marian with ReLU (test_bart.py) also covers the post-norm form, and Pegasus the pre-norm form.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from clearhead.architecture import LayerNorm
from clearhead.families.transformer import annotated_transformer_config, transformer_config
from tests.parity.equations import check_equations, tensors_under
from tests.parity.harness import VOCAB

WIDTH, HEADS, LAYERS, EPSILON = 48, 4, 3, 1e-3
SIZES = {"width": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "feed_forward": 80}


def embed(tokens, table):
    """Return table[token] · √d + PE, PE(p, 2k) = sin(p / 10000^(2k/d)), PE(p, 2k + 1) = cos(p / 10000^(2k/d))."""
    positions = torch.arange(tokens.shape[1], dtype=torch.float64)
    encoding = torch.zeros(tokens.shape[1], WIDTH, dtype=torch.float64)
    for k in range(WIDTH // 2):
        encoding[:, 2 * k] = torch.sin(positions / 10000 ** (2 * k / WIDTH))
        encoding[:, 2 * k + 1] = torch.cos(positions / 10000 ** (2 * k / WIDTH))
    return table[tokens] * WIDTH**0.5 + encoding.to(table.dtype)


def future_mask(length):
    """Return True where a key lies after its query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# --- torch.nn


def torch_attention(w):
    """Return our tensors as nn.MultiheadAttention stores them: query, key and value as one matrix, no bias as zeros."""
    projections = [w[f"{part}.weight"] for part in ("query", "key", "value")]
    zeros = torch.zeros(WIDTH, dtype=projections[0].dtype)
    return {
        "in_proj_weight": torch.cat(projections),
        "in_proj_bias": torch.cat([w.get(f"{part}.bias", zeros) for part in ("query", "key", "value")]),
        "out_proj.weight": w["output.weight"],
        "out_proj.bias": w.get("output.bias", zeros),
    }


def torch_layer(layer_class, w, norm_first):
    """Return a layer of torch.nn with our weights."""
    attentions = {"attention": "self_attn", "cross_attention": "multihead_attn"}
    if layer_class is nn.TransformerEncoderLayer:
        del attentions["cross_attention"]
    tensors = {f"linear1.{name}": tensor for name, tensor in tensors_under(w, "feed_forward.up.").items()}
    tensors |= {f"linear2.{name}": tensor for name, tensor in tensors_under(w, "feed_forward.down.").items()}
    for ours, theirs in attentions.items():
        attention = torch_attention(tensors_under(w, f"{ours}."))
        tensors |= {f"{theirs}.{name}": tensor for name, tensor in attention.items()}
    for number, branch in enumerate([*attentions, "feed_forward"], 1):
        norm = tensors_under(w, f"{branch}_residual.norm.")
        tensors |= {f"norm{number}.{name}": tensor for name, tensor in norm.items()}
    layer = layer_class(WIDTH, HEADS, 80, 0.0, layer_norm_eps=EPSILON, batch_first=True, norm_first=norm_first).eval()
    layer.to(w["feed_forward.up.weight"].dtype).load_state_dict(tensors)
    return layer


def torch_equations(norm_first):
    """Return equations that run torch.nn's layers, for check_equations."""

    def equations(weights, inputs):
        table = weights["encoder.embedding.tokens.weight"]
        padding = ~inputs["source_mask"].bool()
        x, y = embed(inputs["source"], table), embed(inputs["target"], table)
        for number in range(LAYERS):
            w = tensors_under(weights, f"encoder.layers.{number}.")
            x = torch_layer(nn.TransformerEncoderLayer, w, norm_first)(x, src_key_padding_mask=padding)
        x = final_norm(x, tensors_under(weights, "encoder.final_norm."))
        for number in range(LAYERS):
            layer = torch_layer(
                nn.TransformerDecoderLayer, tensors_under(weights, f"decoder.layers.{number}."), norm_first
            )
            y = layer(y, x, tgt_mask=future_mask(y.shape[1]), memory_key_padding_mask=padding)
        return final_norm(y, tensors_under(weights, "decoder.final_norm.")) @ table.T

    def final_norm(x, w):
        assert bool(w) == norm_first  # torch.nn.Transformer always has one, the paper has none
        return functional.layer_norm(x, (WIDTH,), w["weight"], w["bias"], EPSILON) if w else x

    return equations


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_logits_agree_with_torch_layers(placement, attention_bias):
    config = transformer_config(
        **SIZES,
        source_vocab_size=VOCAB,
        target_vocab_size=VOCAB,
        norm=LayerNorm(epsilon=EPSILON),
        placement=placement,
        attention_bias=attention_bias,
    )
    assert check_equations(config, torch_equations(norm_first=placement == "pre")) >= 60


# --- the Annotated Transformer


def deviation_norm(x, w):
    """Return a · (x - mean) / (std + ε) + b; the standard deviation divides by d - 1."""
    centered = x - x.mean(-1, keepdim=True)
    deviation = (centered.pow(2).sum(-1, keepdim=True) / (WIDTH - 1)).sqrt()
    return w["weight"] * centered / (deviation + 1e-6) + w["bias"]


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


def annotated_equations(weights, inputs):
    """Return the logits: x + Sublayer(norm(x)) for each branch, a norm after each stack, then W x + b."""
    padding, later = ~inputs["source_mask"].bool()[:, None, None, :], future_mask(inputs["target"].shape[1])

    def feed_forward(y, w):
        return linear(linear(y, w, "feed_forward.up").clamp(min=0), w, "feed_forward.down")

    x = embed(inputs["source"], weights["encoder.embedding.tokens.weight"])
    for number in range(LAYERS):
        w = tensors_under(weights, f"encoder.layers.{number}.")
        h = deviation_norm(x, tensors_under(w, "attention_residual.norm."))
        x = x + multi_head_attention(h, h, padding, tensors_under(w, "attention."))
        x = x + feed_forward(deviation_norm(x, tensors_under(w, "feed_forward_residual.norm.")), w)
    encoder_output = deviation_norm(x, tensors_under(weights, "encoder.final_norm."))
    y = embed(inputs["target"], weights["decoder.embedding.tokens.weight"])
    for number in range(LAYERS):
        w = tensors_under(weights, f"decoder.layers.{number}.")
        h = deviation_norm(y, tensors_under(w, "attention_residual.norm."))
        y = y + multi_head_attention(h, h, later, tensors_under(w, "attention."))
        h = deviation_norm(y, tensors_under(w, "cross_attention_residual.norm."))
        y = y + multi_head_attention(h, encoder_output, padding, tensors_under(w, "cross_attention."))
        y = y + feed_forward(deviation_norm(y, tensors_under(w, "feed_forward_residual.norm.")), w)
    return linear(deviation_norm(y, tensors_under(weights, "decoder.final_norm.")), weights, "head")


def test_annotated_transformer_agrees_with_its_equations():
    config = annotated_transformer_config(source_vocab_size=VOCAB + 4, target_vocab_size=VOCAB, **SIZES)
    assert check_equations(config, annotated_equations) >= 60
