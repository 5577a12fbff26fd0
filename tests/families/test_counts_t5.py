"""Parameters of the T5 presets, counted on the meta device, against the published numbers."""

import pytest
import torch

from clearhead.families import preset, t5
from clearhead.model.transformer import Transformer

# KerasHub's t5_presets.py (github.com/keras-team/keras-hub), whose early versions hold 3B too and which lists XL and
# XXL of v1.1 as Flan-T5; 11B as one public table has it, between all the others of T5.
# Raffel et al. 2020, §3.7 rounds the first five to 60M, 220M, 770M, 3B and 11B.
PUBLISHED = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}


def test_every_preset_is_counted():
    assert PUBLISHED.keys() == t5.PRESETS.keys()


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters(name, count):
    with torch.device("meta"):
        network = Transformer(preset(name))
    assert sum(parameter.numel() for parameter in network.parameters()) == count
