"""Parameters of the BART, Marian and Pegasus presets, counted and compared with the published numbers."""

import pytest
import torch

from clearhead.families import bart, preset
from clearhead.model.transformer import Transformer

# KerasHub's bart_presets.py (github.com/keras-team/keras-hub), whose two position tables lack two rows each
BART = {"bart-base": (139_417_344, 768), "bart-large": (406_287_360, 1024)}
# Helsinki-NLP/opus-mt-en-de as transformers counts it, from fine-tuning logs; includes two tables of sinusoids
MARIAN, SINUSOIDS = 74_410_496, 2 * 512 * 512
PEGASUS_MILLIONS = 568  # Zhang et al. 2020, §6.1; an exact number was not found


def count(name):
    """Return the number of parameters without the logit bias, which transformers keeps as a buffer."""
    with torch.device("meta"):
        network = Transformer(preset(name))
    parameters = dict(network.named_parameters())
    assert parameters.pop("head.bias").shape == (preset(name).vocab_size,)
    return sum(parameter.numel() for parameter in parameters.values())


def test_every_preset_has_a_published_count():
    assert bart.PRESETS.keys() == BART.keys() | {"marian", "pegasus-large"}


@pytest.mark.parametrize(("name", "published", "width"), [(name, *row) for name, row in BART.items()])
def test_number_of_parameters_of_bart(name, published, width):
    assert count(name) == published + 2 * 2 * width


def test_number_of_parameters_of_marian():
    assert count("marian") == MARIAN - SINUSOIDS


def test_number_of_parameters_of_pegasus():
    """The paper rounds 568.7 million down."""
    assert count("pegasus-large") // 10**6 == PEGASUS_MILLIONS
