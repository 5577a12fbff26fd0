"""Parameters of the Qwen 3 presets, counted on the meta device and compared with the published numbers."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# KerasHub's qwen3_presets.py and qwen3_moe_presets.py (github.com/keras-team/keras-hub), and the parameters outside
# token table and head, from the model cards.
PUBLISHED = {
    "qwen3-0.6b": (596_049_920, "0.44"),
    "qwen3-1.7b": (1_720_574_976, "1.4"),
    "qwen3-4b": (4_022_468_096, "3.6"),
    "qwen3-8b": (8_190_735_360, "6.95"),
    "qwen3-14b": (14_768_307_200, "13.2"),
    "qwen3-32b": (32_762_123_264, "31.2"),
    "qwen3-30b-a3b": (30_532_122_624, "29.9"),
    "qwen3-235b-a22b": (235_093_634_560, "234"),
}


@pytest.mark.parametrize(("name", "count", "without_embedding"), [(name, *row) for name, row in PUBLISHED.items()])
def test_number_of_parameters(name, count, without_embedding):
    with torch.device("meta"):
        network = Transformer(preset(name))
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert sum(sizes.values()) == count
    inner = count - sizes["decoder.embedding.tokens.weight"] - sizes.get("head.weight", 0)
    num_digits = len(without_embedding.partition(".")[2])
    assert f"{inner / 1e9:.{num_digits}f}" == without_embedding
