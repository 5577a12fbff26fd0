"""Parameters of the BERT presets, counted on the meta device, against the released checkpoints."""

import pytest
import torch

from clearhead.families import preset
from clearhead.model.transformer import Transformer

# The released checkpoints hold also the next-sentence head, 2 · width + 2; Devlin et al. 2019 print 110M and 340M.
RELEASED = {"bert-base": 110_106_428, "bert-large": 336_226_108}


@pytest.mark.parametrize(("name", "released"), RELEASED.items())
def test_parameters(name, released):
    config = preset(name)
    with torch.device("meta"):
        network = Transformer(config)
    assert sum(parameter.numel() for parameter in network.parameters()) == released - 2 * config.width - 2
