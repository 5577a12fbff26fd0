"""Parameters of the BART, Marian and Pegasus presets, counted on the meta device, against the published numbers."""

import pytest
import torch

from clearhead.families import bart, preset
from clearhead.model.transformer import Transformer

# Exact counts of the released models without the logit bias, which transformers keeps as a buffer, and without
# sinusoids. fairseq's model list rounds BART to 140M and 400M, Zhang et al. 2020, §6.1 says 568M for Pegasus.
PUBLISHED = {
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "marian": 73_886_208,  # opus-mt-en-de: 74,410,496 with two tables of 512 · 512 sinusoids
    "pegasus-large": 568_699_904,
}


def test_every_preset_is_counted():
    assert PUBLISHED.keys() == bart.PRESETS.keys()


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    parameters = dict(network.named_parameters())
    assert parameters.pop("head.bias").shape == (preset(name).vocab_size,)
    assert sum(parameter.numel() for parameter in parameters.values()) == count
