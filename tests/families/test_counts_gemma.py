"""Parameters of the Gemma 3 presets, counted on the meta device and compared with the published numbers."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# `safetensors.total` of each on the Hub, from KerasHub's gemma3_presets.py (github.com/keras-team/keras-hub) and, for
# 12B, from public copies of the Hub's answers; and millions of parameters outside the token table, from Gemma 3 (2025),
# Table 1, and the 270M's model card.
PUBLISHED = {
    "gemma-3-270m": (268_098_176, 100),
    "gemma-3-1b": (999_885_952, 698),
    "gemma-3-4b": (4_300_079_472, 3_209),
    "gemma-3-12b": (12_187_325_040, 10_759),
    "gemma-3-27b": (27_432_406_640, 25_600),
}
# SigLIP's vision tower, the same in the three multimodal sizes: KerasHub lists 4,299,915,632 parameters for gemma3_4b
# and 3,880,099,328 for gemma3_4b_text; the rest of the difference is the projector of 1152 · 2560 + 1152.
VISION = 416_866_032
VISION_WIDTH = 1152


@pytest.mark.parametrize(("name", "count", "millions"), [(name, *row) for name, row in PUBLISHED.items()])
def test_number_of_parameters(name, count, millions):
    config = preset(name)
    with torch.device("meta"):
        network = Transformer(config)
    table = network.get_parameter("decoder.embedding.tokens.weight").numel()
    total = sum(parameter.numel() for parameter in network.parameters())
    assert round((total - table) / 1e6) == millions
    if count > 4e9:
        projector = VISION_WIDTH * config.width + VISION_WIDTH
        total += VISION + projector
    assert total == count
