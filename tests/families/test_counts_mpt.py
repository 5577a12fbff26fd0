"""Parameters of the MPT presets, counted on the meta device, against the model cards."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# Billions on the model cards; no whole number was found. The shapes in print give 6.649 and 29.957: the first was
# rounded up, the second cut off. Had the head a table of its own, they would be 6.86 and 30.32.
PRINTED = {"mpt-7b": (6.7, 0.06), "mpt-7b-storywriter": (6.7, 0.06), "mpt-30b": (29.95, 0.01)}


@pytest.mark.parametrize(("name", "billions", "slack"), [(name, *row) for name, row in PRINTED.items()])
def test_parameters(name, billions, slack):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert abs(sum(parameter.numel() for parameter in network.parameters()) / 1e9 - billions) <= slack
