"""Parameters of the MPT presets, counted on the meta device, against the released checkpoints."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

PUBLISHED = {
    "mpt-7b": 6_649_286_656,  # 6.7B on the model card
    "mpt-7b-storywriter": 6_649_286_656,
    "mpt-30b": 29_957_200_896,  # 29.95B on the model card, cut off
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert sum(parameter.numel() for parameter in network.parameters()) == count
