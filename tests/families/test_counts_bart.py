"""Parameters of the BART, Marian, Pegasus, mBART and M2M-100 presets, compared with published numbers."""

import pytest
import torch

from clearhead.families import bart, preset
from clearhead.model.transformer import Transformer

# KerasHub's bart_presets.py (github.com/keras-team/keras-hub), whose two position tables lack two rows each
BART = {"bart-base": (139_417_344, 768), "bart-large": (406_287_360, 1024)}
# Helsinki-NLP/opus-mt-en-de as transformers counts it, from fine-tuning logs; includes two tables of sinusoids
MARIAN, SINUSOIDS = 74_410_496, 2 * 512 * 512
# transformers counts parameters of its classes so; mBART's logit bias is a buffer
TRANSLATION = {"mbart-large-50": 610_879_488, "m2m100-418m": 483_905_536, "nllb-200-600m": 615_073_792}
# likewise; LED without the projections of global tokens, 10,630,656 of its 161,844,480 parameters
LONG = {"bigbird-pegasus-large": 576_891_904, "led-base-16384": 151_213_824}
PEGASUS_MILLIONS = 568  # Zhang et al. 2020, §6.1; an exact number was not found


def count(name):
    """Return the number of parameters without the logit bias, which transformers keeps as a buffer."""
    with torch.device("meta"):
        network = Transformer(preset(name))
    parameters = dict(network.named_parameters())
    if preset(name).head.bias:
        assert parameters.pop("head.bias").shape == (preset(name).vocab_size,)
    return sum(parameter.numel() for parameter in parameters.values())


def test_every_preset_has_a_published_count():
    assert bart.PRESETS.keys() == BART.keys() | TRANSLATION.keys() | {"marian", "pegasus-large"}


@pytest.mark.parametrize(("name", "published", "width"), [(name, *row) for name, row in BART.items()])
def test_number_of_parameters_of_bart(name, published, width):
    assert count(name) == published + 2 * 2 * width


@pytest.mark.parametrize("name", TRANSLATION | LONG)
def test_number_of_parameters_of_translation_models(name):
    assert count(name) == (TRANSLATION | LONG)[name]


def test_number_of_parameters_of_marian():
    assert count("marian") == MARIAN - SINUSOIDS


def test_number_of_parameters_of_pegasus():
    """The paper rounds 568.7 million down."""
    assert count("pegasus-large") // 10**6 == PEGASUS_MILLIONS
