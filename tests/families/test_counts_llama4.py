"""Parameters of the Llama 4 presets, counted on the meta device, against the published numbers."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# Exact counts of the released checkpoints (safetensors headers); the model cards say 109B and 400B.
PUBLISHED = {"llama-4-scout": 108_641_793_536, "llama-4-maverick": 401_583_781_376}
VISION = 871_932_416  # the tower that sees images and its projector, the same in both


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert sum(parameter.numel() for parameter in network.parameters()) + VISION == count
