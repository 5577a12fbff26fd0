"""Parameters of the BLOOM presets, counted on the meta device, against the model cards."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

PUBLISHED = {
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert sum(parameter.numel() for parameter in network.parameters()) == count
