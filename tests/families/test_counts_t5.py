"""Parameters of the T5 presets, counted on the meta device and compared with the published numbers."""

import pytest

from clearhead.families import preset, t5
from tests.families.counting import count_parameters

# KerasHub's t5_presets.py (github.com/keras-team/keras-hub), whose early versions include 3B, and which lists XL and
# XXL of v1.1 as Flan-T5; 11B from a public table that agrees with all the others.
# Raffel et al. 2020, §3.7 round the first five to 60M, 220M, 770M, 3B and 11B.
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
    # As the Hub counts google/mt5-small, google/mt5-base and google/umt5-small
    "mt5-small": 300_176_768,
    "mt5-base": 582_401_280,
    "umt5-small": 306_601_984,
}


def test_every_preset_has_a_published_count():
    assert PUBLISHED.keys() == t5.PRESETS.keys()


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_number_of_parameters(name, count):
    assert count_parameters(preset(name)) == count
