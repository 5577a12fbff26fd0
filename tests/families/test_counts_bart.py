"""Parameters of the BART, Marian and Pegasus presets, counted on the meta device, against the published numbers."""

import pytest
import torch

from clearhead.families import bart, preset
from clearhead.model.transformer import Transformer

# KerasHub's bart_presets.py (github.com/keras-team/keras-hub), where the two position tables lack two rows each.
BART = {"bart-base": (139_417_344, 768), "bart-large": (406_287_360, 1024)}
# Of Helsinki-NLP/opus-mt-en-de as transformers counts it (fine-tuning logs print it), with two tables of sinusoids.
MARIAN, SINUSOIDS = 74_410_496, 2 * 512 * 512
PEGASUS_MILLIONS = 568  # Zhang et al. 2020, §6.1; no whole number was found


def count(name):
    """Without the logit bias, which transformers keeps as a buffer."""
    with torch.device("meta"):
        network = Transformer(preset(name))
    parameters = dict(network.named_parameters())
    assert parameters.pop("head.bias").shape == (preset(name).vocab_size,)
    return sum(parameter.numel() for parameter in parameters.values())


def test_every_preset_is_counted():
    assert bart.PRESETS.keys() == BART.keys() | {"marian", "pegasus-large"}


@pytest.mark.parametrize(("name", "published", "width"), [(name, *row) for name, row in BART.items()])
def test_parameters_of_bart(name, published, width):
    assert count(name) == published + 2 * 2 * width


def test_parameters_of_marian():
    assert count("marian") == MARIAN - SINUSOIDS


def test_parameters_of_pegasus():
    """568.7 million, cut off in print."""
    assert count("pegasus-large") // 10**6 == PEGASUS_MILLIONS
