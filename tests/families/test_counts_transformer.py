"""Parameters of the Transformer presets, counted on the meta device and compared with torch's layers and the paper."""

import pytest
import torch
from torch import nn

from clearhead.families import preset, transformer
from clearhead.model.transformer import Transformer

# Vaswani et al. 2017, Table 3. No interpretation of the paper gives both numbers: with 37000 tokens the base model has
# 63.0M and the big one 214.2M; 65M would need about 40800 tokens, 213M about 35900.
PAPER = {"transformer-base": 65e6, "transformer-big": 213e6}
PLACEMENTS = ["", "-pre-norm"]


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


def count_preset(name):
    with torch.device("meta"):
        return count(Transformer(preset(name)))


def count_torch_layers(width, num_heads, feed_forward):
    with torch.device("meta"):
        encoder = nn.TransformerEncoderLayer(width, num_heads, feed_forward)
        decoder = nn.TransformerDecoderLayer(width, num_heads, feed_forward)
    return 6 * count(encoder) + 6 * count(decoder)


def test_every_preset_has_a_published_count():
    assert transformer.PRESETS.keys() == {
        *(name + placement for name in PAPER for placement in PLACEMENTS),
        "annotated-transformer",
    }


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("name", "width", "num_heads", "feed_forward"),
    [("transformer-base", 512, 8, 2048), ("transformer-big", 1024, 16, 4096)],
)
def test_number_of_parameters(name, width, num_heads, feed_forward, placement):
    attention_biases = 18 * 4 * width  # torch has biases in 6 + 2 · 6 attentions, the formulas of §3.2 have none
    final_norms = 2 * 2 * width if placement else 0
    expected = count_torch_layers(width, num_heads, feed_forward) - attention_biases + final_norms + 37000 * width
    assert count_preset(name + placement) == expected
    assert count_preset(name + placement) == pytest.approx(PAPER[name], rel=0.035)


def test_number_of_parameters_of_the_annotated_transformer():
    """It has three tables of 37000 tokens, biases and two final norms."""
    tables, head_bias, final_norms = 3 * 37000 * 512, 37000, 2 * 2 * 512
    expected = count_torch_layers(512, 8, 2048) + tables + head_bias + final_norms
    assert count_preset("annotated-transformer") == expected


@pytest.mark.parametrize(("name", "rate"), [("transformer-base", 0.1), ("transformer-big", 0.3)])
def test_dropout_is_that_of_table_3(name, rate):
    dropout = preset(name).dropout
    assert (dropout.embedding, dropout.residual, dropout.attention, dropout.activation) == (rate, rate, 0.0, 0.0)
